"""Assembles our own engine, on a model or as a mock that waits instead of computing."""

import dataclasses
import functools
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import structlog

from baton_proto.sampling import VLLM_ALONE, SamplingParams
from engine.blocks.block_manager import BlockManager
from engine.blocks.disk_copies import DiskTier
from engine.blocks.lower_tier import LowerTier
from engine.core.engine import Engine
from engine.core.loop import EngineLoop
from engine.drafts.ngrams import NgramDrafter
from engine.loading.model_memory import ModelMemory
from engine.runners.mock_runner import MockRunner
from engine.runners.timed_loop import TimedLoop
from engine.sequences.batch import Runner
from engine.tiers.disk_kv import disk_kv, fingerprint
from engine.tiers.host_kv import host_kv
from kvtransfer.prefill_side.sender import Sender
from kvtransfer.slab.slab import Slab
from runtime.checkpoint.mock_model import answer_vocabulary
from runtime.checkpoint.model_files import ModelFiles
from runtime.checkpoint.served_model import is_mock, served_model
from runtime.config.serving import ServingConfig
from runtime.device.kernel_cache import keep_kernels
from runtime.errors import ConfigError, RankLostError
from worker.engines.base import EngineAssembly, Limits, MakeLoop, SharedKv, grammar_compiler, model_hash, pool_layout

if TYPE_CHECKING:  # the mock engine needs no torch
    from engine.loading.loaded_model import LoadedModel
    from engine.ranks.tensor_parallel import TensorParallelModel

log = structlog.get_logger()


def refusal(sampling: SamplingParams) -> str:
    """Why our own engine cannot serve a request; empty when it can."""
    name = next((name for name in VLLM_ALONE if getattr(sampling, name)), None)
    return "" if name is None else f"{name}: workers with vLLM alone have a use for it; leave it out"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnAssembly(EngineAssembly):
    """Our own engine, which a program may also step itself."""

    engine: Engine
    memory: "ModelMemory | TensorParallelModel"
    slab: Slab
    kv: SharedKv


def build_engine(config: ServingConfig, on_rank_lost: Callable[[RankLostError], None] | None = None) -> OwnAssembly:
    """The mock or the model, as the configuration says. `on_rank_lost`: what another thread calls when the engine can
    compute no more; None: the process ends. Raises ConfigError or ModelError."""
    return build_mock(config) if is_mock(config) else build_own(config, on_rank_lost)


def build_own(config: ServingConfig, on_rank_lost: Callable[[RankLostError], None] | None = None) -> OwnAssembly:
    """Raises ConfigError or ModelError."""
    files = served_model(config)
    keep_kernels()
    # Imported late, because torch takes seconds and the mock engine needs none of it.
    from engine.loading.loaded_model import load_model
    from engine.ranks.ranks import end_process
    from engine.ranks.tensor_parallel import load_tensor_parallel

    engine_config = msgspec.structs.replace(config.engine, threads=_threads(config))
    loaded: LoadedModel | TensorParallelModel
    memory: ModelMemory | TensorParallelModel
    if config.engine.tensor_parallel == 1:
        loaded = load_model(files, engine_config)
        memory = loaded.memory
        manager = _manager(files, config, loaded.slab, memory)
    else:
        on_lost = on_rank_lost or end_process
        loaded = memory = load_tensor_parallel(files, engine_config, on_lost)
        manager = _manager(files, config, loaded.slab, loaded, loaded)
    engine = _engine(files, config, loaded.runner, manager)
    form = "two groups" if loaded.slab.layout.window_layers else ""
    kv = SharedKv(engine, loaded.slab, loaded.sender, loaded.other_slabs, form=form)
    make_loop = functools.partial(EngineLoop, engine)
    return _assembled(files, config, engine, memory, make_loop, loaded.slab, kv, loaded.close)


def build_mock(config: ServingConfig) -> OwnAssembly:
    """Raises ConfigError."""
    if config.engine.tensor_parallel > 1:
        problem = "the mock model computes nothing that could be shared: leave it at 1"
        raise ConfigError("engine.tensor_parallel", problem)
    files = served_model(config)
    slab = Slab(pool_layout(files, config.mock.kv_blocks, config.engine.block_size))
    memory = ModelMemory(None, slab)
    vocabulary = answer_vocabulary(files, config.mock)
    runner = MockRunner(config.step_times, config.mock.answer_tokens, vocabulary, min(files.eos_token_ids))
    engine = _engine(files, config, runner, _manager(files, config, slab, memory), runner.clock)
    kv = SharedKv(engine, slab, functools.partial(Sender, slab))
    return _assembled(files, config, engine, memory, functools.partial(TimedLoop, engine), slab, kv, slab.close)


def _engine(
    files: ModelFiles,
    config: ServingConfig,
    runner: Runner,
    manager: BlockManager,
    clock: Callable[[], float] = time.perf_counter,
) -> Engine:
    return Engine(
        runner,
        manager,
        max_batch_tokens=config.engine.max_batch_tokens,
        max_running=config.engine.max_running,
        eos_token_ids=files.eos_token_ids,
        targets=config.step_targets,
        step_times=config.step_times,
        clock=clock,
        drafter=NgramDrafter() if config.engine.speculation == "ngram" else None,
    )


def _manager(
    files: ModelFiles,
    config: ServingConfig,
    slab: Slab,
    memory: "ModelMemory | TensorParallelModel",
    on_ranks: "TensorParallelModel | None" = None,
) -> BlockManager:
    """on_ranks: has the tiers of all ranks; None: there is one rank."""
    host = host_kv(slab, config.engine, _ranks_of_machine(config))
    disk, found = disk_kv(host, slab.layout, config.engine, model_hash(files, memory))
    tier: LowerTier | None = host
    lowest: DiskTier | None = disk
    if on_ranks is not None and host is not None:
        tier, lowest = on_ranks.tier(host), on_ranks.disk(disk) if disk is not None else None
    return BlockManager(
        slab.layout.num_blocks,
        slab.layout.block_size,
        tier,
        lowest,
        found,
        window=files.config.widest_window,
        num_window_blocks=slab.layout.num_window_blocks,
    )


def _assembled(
    files: ModelFiles,
    config: ServingConfig,
    engine: Engine,
    memory: "ModelMemory | TensorParallelModel",
    make_loop: MakeLoop,
    slab: Slab,
    kv: SharedKv,
    close: Callable[[], None],
) -> OwnAssembly:
    one_rank = slab.layout
    layout = dataclasses.replace(one_rank, num_kv_heads=files.config.num_kv_heads)
    pool_tokens = layout.num_blocks * layout.block_size

    def close_all() -> None:
        engine.block_manager.tiers.close()
        close()

    def weights_changed() -> None:
        ranks = config.engine.tensor_parallel
        engine.block_manager.tiers.move_disk(fingerprint(one_rank, model_hash(files, memory), ranks))

    blocks = {"blocks": layout.num_blocks, "window_blocks": layout.num_window_blocks}
    log.info("engine built", model=files.name, **blocks, kv_bytes=layout.nbytes, dtype=layout.dtype)
    return OwnAssembly(
        name="baton",
        config=config,
        files=files,
        engine=engine,
        memory=memory,
        slab=slab,
        make_loop=make_loop,
        layout=layout,
        max_model_len=min(files.max_position, pool_tokens, config.engine.max_model_len or pool_tokens),
        grammars=grammar_compiler(files),
        kv=kv,
        limits=Limits(refuses=refusal),
        close=close_all,
        weights_changed=weights_changed,
    )


def _threads(config: ServingConfig) -> int:
    """CPU threads of one rank: the ranks of all workers of a machine share its cores."""
    return config.engine.threads or max(1, len(os.sched_getaffinity(0)) // _ranks_of_machine(config))


def _ranks_of_machine(config: ServingConfig) -> int:
    """The ranks of all workers of a machine, which share its cores and its memory."""
    return max(1, config.workers.total) * config.engine.tensor_parallel
