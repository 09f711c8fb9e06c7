"""Builds the engine of a worker from its configuration. A worker takes any function with the signature of
`build_engine`, which is the seam for another kind of engine."""

import dataclasses
import functools
import importlib
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import structlog
import xxhash

from baton_proto.sampling import SamplingParams
from engine.blocks.block_manager import BlockManager
from engine.core.engine import Engine
from engine.core.loop import EngineLoop
from engine.loading.model_memory import ModelMemory, Tensors
from engine.runners.mock_runner import MockRunner
from engine.runners.timed_loop import TimedLoop
from engine.tiers.disk_kv import disk_kv
from engine.tiers.host_kv import host_kv
from kvtransfer.prefill_side.sender import Sender
from kvtransfer.prefill_side.sending import KvSender
from kvtransfer.slab.adopted_slab import AdoptedSlab
from kvtransfer.slab.head_plan import Shard
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from kvtransfer.wire.identity import SlabIdentity
from runtime.checkpoint.mock_model import answer_vocabulary
from runtime.checkpoint.model_files import ModelFiles
from runtime.checkpoint.served_model import is_mock, served_model
from runtime.config.serving import ServingConfig, TransferConfig
from runtime.device.kernel_cache import keep_kernels
from runtime.errors import ConfigError, RankLostError
from runtime.grammar.compiler import GrammarCompiler
from runtime.security.cluster_key import ClusterKey
from worker.engine_bridge import LoopFactory

if TYPE_CHECKING:  # the mock engine needs no torch
    from engine.model.checkpoint import Checkpoint
    from engine.ranks.tensor_parallel import TensorParallelModel

log = structlog.get_logger()

MakeSender = Callable[[SlabIdentity, TransferConfig, ClusterKey | None], KvSender]


class SleepingMemory(Protocol):
    """The memory that a worker gives back when it sleeps (see engine/loading/model_memory.py). Engine thread only, but
    for `update` and `opened`, and when nothing runs."""

    @property
    def asleep(self) -> tuple[str, ...]: ...

    @property
    def fingerprint(self) -> str: ...  # of the weights

    def sleep(self, level: int) -> int | Awaitable[int]: ...

    def wake(self, tags: tuple[str, ...]) -> Awaitable[None] | None: ...

    @property
    def problem(self) -> str: ...  # why nothing may be computed; empty when it may

    def update(self, tensors: Tensors) -> None: ...

    def opened(self, folder: Path) -> "Checkpoint": ...

    def read(self, checkpoint: "Checkpoint") -> None: ...


Refuses = Callable[[SamplingParams], str]
"""Why the engine cannot serve a request with these parameters; empty when it can."""
Repeats = Callable[[SamplingParams], bool]
"""Whether the engine computes the answer of a lost worker from its beginning again."""


@dataclass(frozen=True, slots=True)
class EngineAssembly:
    engine: Engine
    slab: Slab | None  # of rank 0; None: the engine takes no KV from others and gives none away
    layout: SlabLayout  # for all KV heads of the model: with one rank the layout of `slab`
    ranks: int
    make_sender: MakeSender  # for a prefill worker, which closes the sender
    other_slabs: Callable[[], Sequence[AdoptedSlab]]  # of ranks 1, 2, ...; for a decode worker, which closes them
    memory: SleepingMemory
    model: str  # name that clients use
    config_hash: str
    max_model_len: int  # prompt and output together
    close: Callable[[], None]  # after the engine thread and the transfers have ended
    grammars: GrammarCompiler
    loop: LoopFactory = EngineLoop  # what steps the engine
    engine_masks: bool = False  # whether the engine compiles grammars itself; else sequences have matchers
    refuses: Refuses = lambda sampling: ""
    repeats: Repeats = lambda sampling: False
    heeds_due: bool = True  # whether prompts whose first token is due go before others
    kind: str = "baton"  # of the engine, as operators are told: "baton" | "vllm" | "external"
    kv_form: str = ""  # what the bytes of a block depend on beside layout and model, where it is not our own engine

    @property
    def own_slab(self) -> Slab:
        """The slab of an engine that has one."""
        assert self.slab is not None, "only our own engine moves KV"
        return self.slab

    @property
    def model_hash(self) -> str:
        """Of configuration and weights; workers whose hashes differ exchange no KV. Another one after an update."""
        return _model_hash(self.config_hash, self.memory)

    @property
    def announced_form(self) -> str:
        """The form of the KV for routers, which pair workers of one form alone. An engine that takes no KV has a form
        of its own, so that no prompt is computed for it elsewhere."""
        return f"{self.layout.dtype} {'alone' if self.slab is None else self.kv_form}".rstrip()

    def identity(self, worker_id: str, incarnation: int) -> SlabIdentity:
        meaning = self.model_hash + self.kv_form
        return SlabIdentity(worker_id, incarnation, meaning, self.layout, Shard(0, self.ranks))


EngineFactory = Callable[[ServingConfig], EngineAssembly]


BUILDERS = {"baton": ("worker.engines.own", "build_engine"), "vllm": ("worker.engines.vllm", "build_vllm")}
"""Module and function by `workers.engine`; only the module of the engine that is wanted is imported."""


def build_worker_engine(config: ServingConfig) -> EngineAssembly:
    """Raises ConfigError or ModelError."""
    module, function = BUILDERS[config.workers.engine]
    build: EngineFactory = getattr(importlib.import_module(module), function)
    return build(config)


def build_engine(config: ServingConfig, on_rank_lost: Callable[[RankLostError], None] | None = None) -> EngineAssembly:
    """`on_rank_lost`: what another thread calls when the engine can compute no more; None: the process ends. Raises
    ConfigError or ModelError."""
    files = served_model(config)
    return _mock_engine(files, config) if is_mock(config) else _model_engine(files, config, on_rank_lost)


def _model_engine(
    files: ModelFiles, config: ServingConfig, on_rank_lost: Callable[[RankLostError], None] | None
) -> EngineAssembly:
    keep_kernels()
    # Imported late, because torch takes seconds and the mock engine needs none of it.
    from engine.loading.loaded_model import LoadedModel, load_model
    from engine.ranks.ranks import end_process
    from engine.ranks.tensor_parallel import TensorParallelModel, load_tensor_parallel

    engine_config = msgspec.structs.replace(config.engine, threads=_threads(config))
    loaded: LoadedModel | TensorParallelModel
    if config.engine.tensor_parallel == 1:
        loaded = load_model(files, engine_config)
    else:
        loaded = load_tensor_parallel(files, engine_config, on_rank_lost or end_process)
    slab = loaded.slab
    manager = _manager(files, config, slab, loaded, loaded if isinstance(loaded, TensorParallelModel) else None)
    engine = Engine(loaded.runner, manager, **_limits(files, config))
    return _assembled(files, config, engine, slab, loaded, loaded.sender, loaded.other_slabs, loaded.close, EngineLoop)


def _mock_engine(files: ModelFiles, config: ServingConfig) -> EngineAssembly:
    if config.engine.tensor_parallel > 1:
        problem = "the mock model computes nothing that could be shared: leave it at 1"
        raise ConfigError("engine.tensor_parallel", problem)
    model, block_size = files.config, config.engine.block_size
    layout = SlabLayout(
        model.num_layers, config.mock.kv_blocks, model.num_kv_heads, block_size, model.head_dim, model.dtype
    )
    runner = MockRunner(config.mock, answer_vocabulary(files, config.mock), min(files.eos_token_ids))
    slab = Slab(layout)
    memory = ModelMemory(None, slab)
    manager = _manager(files, config, slab, memory)
    engine = Engine(runner, manager, **_limits(files, config), clock=runner.clock)
    make_sender = functools.partial(Sender, slab)
    return _assembled(files, config, engine, slab, memory, make_sender, list, slab.close, TimedLoop)


def _manager(
    files: ModelFiles,
    config: ServingConfig,
    slab: Slab,
    memory: SleepingMemory,
    on_ranks: "TensorParallelModel | None" = None,
) -> BlockManager:
    """on_ranks: has the tiers of all ranks; None: there is one rank."""
    host = host_kv(slab, config.engine, _ranks_of_machine(config))
    model_hash = _model_hash(config_hash(files), memory)  # waits until they are hashed: no event loop runs yet
    disk, found = disk_kv(host, slab.layout, config.engine, model_hash)
    if on_ranks is None or host is None:
        return BlockManager(slab.layout.num_blocks, slab.layout.block_size, host, disk, found)
    tier, ranked_disk = on_ranks.tier(host), on_ranks.disk(disk) if disk is not None else None
    return BlockManager(slab.layout.num_blocks, slab.layout.block_size, tier, ranked_disk, found)


def _model_hash(shape: str, memory: SleepingMemory) -> str:
    return f"{shape}-{memory.fingerprint}"


def config_hash(files: ModelFiles) -> str:
    """Names the model's shape."""
    return xxhash.xxh3_64_hexdigest(repr(files.config).encode())


def _limits(files: ModelFiles, config: ServingConfig) -> dict[str, Any]:
    return {
        "max_batch_tokens": config.engine.max_batch_tokens,
        "max_running": config.engine.max_running,
        "eos_token_ids": files.eos_token_ids,
    }


def _assembled(
    files: ModelFiles,
    config: ServingConfig,
    engine: Engine,
    slab: Slab,
    memory: SleepingMemory,
    make_sender: MakeSender,
    other_slabs: Callable[[], Sequence[AdoptedSlab]],
    close: Callable[[], None],
    loop: LoopFactory,
) -> EngineAssembly:
    layout = dataclasses.replace(slab.layout, num_kv_heads=files.config.num_kv_heads)
    pool_tokens = layout.num_blocks * layout.block_size

    def close_all() -> None:
        engine.block_manager.close()
        close()

    log.info("engine built", model=files.name, blocks=layout.num_blocks, kv_bytes=layout.nbytes, dtype=layout.dtype)
    return EngineAssembly(
        engine=engine,
        slab=slab,
        layout=layout,
        ranks=config.engine.tensor_parallel,
        make_sender=make_sender,
        other_slabs=other_slabs,
        memory=memory,
        model=config.served_model_name or files.name,
        config_hash=config_hash(files),
        max_model_len=min(files.max_position, pool_tokens, config.engine.max_model_len or pool_tokens),
        close=close_all,
        grammars=GrammarCompiler(files.folder, files.config.vocab_size, files.eos_token_ids),
        loop=loop,
    )


def _threads(config: ServingConfig) -> int:
    """CPU threads of one rank: the ranks of all workers of a machine share its cores."""
    return config.engine.threads or max(1, len(os.sched_getaffinity(0)) // _ranks_of_machine(config))


def _ranks_of_machine(config: ServingConfig) -> int:
    """The ranks of all workers of a machine, which share its cores and its memory."""
    return max(1, config.workers.total) * config.engine.tensor_parallel
