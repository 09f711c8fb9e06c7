"""Assembles vLLM as a worker's engine: `workers.engine: vllm`."""

import functools
from dataclasses import replace

import structlog

from baton_proto.pooling import EMBED, GENERATE
from engine.vllm.arguments import POOLING, check_vllm
from engine.vllm.cache import VllmCache
from engine.vllm.engine import VllmEngine
from engine.vllm.image_prompts import sees
from engine.vllm.kv.engine import SharingEngine
from engine.vllm.loop import VllmLoop
from engine.vllm.memory import VllmMemory
from engine.vllm.pooling import tasks_of
from engine.vllm.sampling import repeats
from engine.vllm.start import StartedVllm
from kvtransfer.prefill_side.sender import Sender
from runtime.checkpoint.fingerprint import fingerprint
from runtime.checkpoint.model_files import ModelFiles, weight_files
from runtime.checkpoint.served_model import served_model
from runtime.config.serving import ServingConfig
from runtime.errors import ConfigError, ModelError
from worker.engines.base import EngineAssembly, Limits, OnStep, SharedKv, grammar_compiler, pool_layout

log = structlog.get_logger()
LIMITS = Limits(masks=True, repeats=repeats)


def build_vllm(config: ServingConfig) -> EngineAssembly:
    """Raises ConfigError, ModelError or UnavailableError. Event loop only."""
    check_vllm(config)
    files = served_model(config)
    return _assembled(config, files, StartedVllm(config, files))


def _assembled(config: ServingConfig, files: ModelFiles, vllm: StartedVllm) -> EngineAssembly:
    from vllm.platforms import current_platform

    theirs = vllm.llm.vllm_config
    if theirs.cache_config.block_size != config.engine.block_size:
        problem = f"vLLM takes {theirs.cache_config.block_size} for this model: set the same"
        raise ConfigError("engine.block_size", problem)
    num_blocks = theirs.cache_config.num_gpu_blocks - 1  # one holds nothing
    tasks = tasks_of(theirs.model_config)
    if not tasks:
        raise ConfigError("model", "has several labels, of which there is no score: serve it in vLLM")
    if GENERATE not in tasks and config.vllm.get("runner") != POOLING:
        raise ConfigError("vllm.runner", f"the model does not generate, but can {tasks[0]}: set it to pooling")
    if num_blocks < 1:
        raise ConfigError("model", "has no KV cache in vLLM: serve it there, as one of external_workers")
    dimension = theirs.model_config.embedding_size if EMBED in tasks else 0
    dtype = str(theirs.model_config.dtype).removeprefix("torch.")
    layout = pool_layout(files, num_blocks, config.engine.block_size, dtype) if vllm.slab is None else vllm.slab.layout
    cache = VllmCache(layout.block_size, num_blocks)
    kv: SharedKv | None = None
    engine: VllmEngine
    if vllm.link is not None and vllm.slab is not None:
        engine = sharing = SharingEngine(vllm.llm, cache, files.eos_token_ids, vllm.link)
        kv = SharedKv(sharing, vllm.slab, functools.partial(Sender, vllm.slab), repeats_first=False, form=vllm.form)
    else:
        engine = VllmEngine(vllm.llm, cache, files.eos_token_ids)
    memory = VllmMemory(vllm.llm, cache, weights_fingerprint(files), on_cpu=current_platform.is_cpu())

    def make_loop(on_step: OnStep) -> VllmLoop:
        memory.loop = VllmLoop(engine, vllm.events(), on_step)
        return memory.loop

    log.info("vLLM built", model=files.name, blocks=num_blocks, block_size=layout.block_size)
    return EngineAssembly(
        name="vllm",
        config=config,
        files=files,
        engine=engine,
        memory=memory,
        make_loop=make_loop,
        layout=layout,
        max_model_len=min(theirs.model_config.max_model_len, num_blocks * layout.block_size),
        grammars=grammar_compiler(files),
        kv=kv,
        limits=replace(LIMITS, sees=sees(theirs.model_config), tasks=tasks, dimension=dimension),
        note=lambda: cache.note,
        adapters=engine.adapters,
        close=vllm.close,
    )


def weights_fingerprint(files: ModelFiles) -> str:
    """Names the weights as our own engine does, so that both may serve them together."""
    from engine.model.checkpoint import Checkpoint  # here: it needs torch

    try:
        return Checkpoint(files.folder).fingerprint()
    except ModelError:  # of tensors that our own engine cannot read
        return "-".join(map(fingerprint, weight_files(files.folder)))
