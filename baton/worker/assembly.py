"""Builds the engine of a worker from its configuration: the one place that knows which parts make an engine.

`build_engine` is the seam for another kind of engine: a worker takes any function of this signature.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog

from baton.config import ServingConfig
from engine.block_manager import BlockManager
from engine.engine import Engine
from engine.loaded_model import load_model
from engine.model_files import resolve_model
from kvtransfer.layout import SlabLayout
from kvtransfer.slab import Slab

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EngineAssembly:
    engine: Engine
    slab: Slab
    layout: SlabLayout
    model: str  # name that clients use
    model_hash: str
    max_model_len: int  # prompt and output together

    def close(self) -> None:
        """After the engine thread and the transfers have ended."""
        self.slab.close()


EngineFactory = Callable[[ServingConfig], EngineAssembly]


def build_engine(config: ServingConfig) -> EngineAssembly:
    """Raises ConfigError or ModelError."""
    files = resolve_model(config.model, progress=False)
    loaded = load_model(files, msgspec.structs.replace(config.engine, threads=_threads(config)))
    layout = loaded.slab.layout
    engine = Engine(
        loaded.runner,
        BlockManager(layout.num_blocks, layout.block_size),
        max_batch_tokens=config.engine.max_batch_tokens,
        max_running=config.engine.max_running,
        eos_token_ids=files.eos_token_ids,
    )
    pool_tokens = layout.num_blocks * layout.block_size
    limits = [files.max_position, pool_tokens, config.engine.max_model_len or pool_tokens]
    log.info("engine built", model=files.name, blocks=layout.num_blocks, kv_bytes=layout.nbytes, dtype=layout.dtype)
    return EngineAssembly(
        engine=engine,
        slab=loaded.slab,
        layout=layout,
        model=config.served_model_name or files.name,
        model_hash=files.model_hash,
        max_model_len=min(limits),
    )


def _threads(config: ServingConfig) -> int:
    """Workers of one machine share its cores instead of fighting for them."""
    workers = max(1, config.workers.prefill + config.workers.decode)
    return config.engine.threads or max(1, len(os.sched_getaffinity(0)) // workers)
