"""Builds the engine of an external worker from what its server has told."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from engine.core.engine import Engine, StepOutput
from engine.vllm.events.stream import VllmStream
from engine.vllm.loop import VllmLoop
from engine.vllm.sampling import refusal, repeats
from engine.vllm.server.agreement import Facts
from engine.vllm.server.cache import ExternalCache
from engine.vllm.server.core import ServerCore
from engine.vllm.server.engine import ExternalEngine
from kvtransfer.slab.layout import SlabLayout
from runtime.checkpoint.model_files import ModelFiles
from runtime.checkpoint.served_model import served_model
from runtime.config.external import ExternalWorkerConfig
from runtime.config.serving import ServingConfig
from runtime.errors import ModelError, UnavailableError
from runtime.grammar.compiler import GrammarCompiler
from worker.engines.own import EngineAssembly, config_hash
from worker.engines.vllm import CONNECT_TIMEOUT_S, no_sender, weights_fingerprint


class ExternalMemory:
    """The memory of a server that others use too: it neither sleeps nor takes new weights at our word."""

    problem = ""
    asleep: tuple[str, ...] = ()

    def __init__(self, fingerprint: str) -> None:
        """fingerprint: that of our own copy of the weights, because the server tells none."""
        self.fingerprint = fingerprint

    def sleep(self, level: int) -> int:
        raise UnavailableError("an external worker does not sleep: whoever started its engine ends it")

    def wake(self, tags: tuple[str, ...]) -> None: ...

    def update(self, tensors: Any) -> None:
        raise self._no_update()

    def opened(self, folder: Any) -> Any:
        raise self._no_update()

    def read(self, checkpoint: Any) -> None:
        raise self._no_update()

    def _no_update(self) -> ModelError:
        return ModelError("weights", "an external worker takes no new weights: start its engine with them")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What takes long to make, and is the same in each life of the worker."""

    files: ModelFiles
    fingerprint: str
    grammars: GrammarCompiler


def prepared(config: ServingConfig) -> Prepared:
    """Raises ConfigError or ModelError."""
    files = served_model(config)
    grammars = GrammarCompiler(files.folder, files.config.vocab_size, files.eos_token_ids)
    return Prepared(files, weights_fingerprint(files), grammars)


def external_assembly(
    config: ServingConfig, external: ExternalWorkerConfig, ours: Prepared, facts: Facts, core: ServerCore
) -> EngineAssembly:
    """Event loop only; quick, because the server is watched meanwhile."""
    files, model = ours.files, ours.files.config
    layout = SlabLayout(
        *(model.num_layers, facts.num_blocks, model.num_kv_heads, config.engine.block_size, model.head_dim),
        model.dtype,
    )
    cache = ExternalCache(layout.block_size, layout.num_blocks)
    engine = ExternalEngine(core, cache, facts.model, files.eos_token_ids, facts.seeds)

    def make_loop(_: Engine, on_step: Callable[[StepOutput], None]) -> VllmLoop:
        return VllmLoop(engine, VllmStream(external.events, external.replay, CONNECT_TIMEOUT_S), on_step)

    return EngineAssembly(
        engine=cast(Engine, engine),  # it has what worker/ and decode_worker/ ask of one that shares no KV
        slab=None,
        layout=layout,
        ranks=1,
        make_sender=no_sender,
        other_slabs=list,
        memory=ExternalMemory(ours.fingerprint),
        model=config.served_model_name or files.name,
        config_hash=config_hash(files),
        max_model_len=min(facts.max_model_len, layout.num_blocks * layout.block_size),
        close=lambda: None,
        grammars=ours.grammars,
        loop=make_loop,
        engine_masks=True,
        refuses=refusal,
        repeats=repeats,
        heeds_due=False,
        kind="external",
    )
