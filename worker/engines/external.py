"""Assembles the engine of an external worker: a server of vLLM that somebody else starts and ends."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, Final, Self

from baton_proto.pooling import GENERATE
from engine.vllm.events.stream import VllmStream
from engine.vllm.loop import VllmLoop
from engine.vllm.memory import FixedMemory
from engine.vllm.server.agreement import Facts, agreed
from engine.vllm.server.cache import ExternalCache
from engine.vllm.server.core import ServerCore
from engine.vllm.server.engine import ExternalEngine as Engine
from engine.vllm.server.ranks import Rank
from engine.vllm.server.server import VllmServer
from engine.vllm.server.watch import ServerWatch
from engine.vllm.start import CONNECT_TIMEOUT_S
from runtime.checkpoint.served_model import served_model
from runtime.config.external import ExternalWorkerConfig
from runtime.config.serving import ServingConfig
from worker.engines.base import EngineAssembly, grammar_compiler, pool_layout
from worker.engines.vllm import LIMITS, weights_fingerprint

NO_OFFER: Final = "it does not say where a prompt's KV is: if its connector has to, --kv-transfer-config is missing"


class ExternalEngine:
    """Implements `worker.engines.base.EngineElsewhere`. What takes long to make is made once."""

    def __init__(self, config: ServingConfig, external: ExternalWorkerConfig) -> None:
        """Raises ConfigError or ModelError."""
        self._config = config
        self._external = external
        self._server = VllmServer(external)
        self._files = served_model(config)
        # Beside workers of ours it goes by our own copy of the weights; alone by the model's configuration.
        self._fingerprint = weights_fingerprint(self._files) if config.computes else ""
        self._grammars = grammar_compiler(self._files)

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._server.__aexit__(*error)

    @asynccontextmanager
    async def life(self) -> AsyncIterator[list[EngineAssembly]]:
        facts = await agreed(self._config, self._external, self._files, self._server)
        async with AsyncExitStack() as stack, ServerWatch(self._server) as watch:
            cores = [(rank, ServerCore(self._server, watch, rank)) for rank in facts.ranks]
            for _, core in cores:
                await stack.enter_async_context(core)
            await watch.look()  # a request may name an adapter from the first one on
            yield [self._assembled(facts, rank, core, watch) for rank, core in cores]

    def _assembled(self, facts: Facts, rank: Rank, core: ServerCore, watch: ServerWatch) -> EngineAssembly:
        """Event loop only; quick, because the server is watched meanwhile."""
        block_size = self._config.engine.block_size
        # A server that only pools may have no KV cache, and says how long its prompts may be.
        needed = 0 if GENERATE in facts.tasks else -(-facts.max_model_len // block_size)
        layout = pool_layout(self._files, max(rank.num_blocks, needed), block_size)
        cache = ExternalCache(layout.block_size, layout.num_blocks)
        engine = Engine(core, cache, facts.model, self._files.eos_token_ids)
        return EngineAssembly(
            name="external",
            config=self._config,
            files=self._files,
            engine=engine,
            memory=FixedMemory(self._fingerprint),
            make_loop=lambda on_step: VllmLoop(engine, _events(rank), on_step),
            layout=layout,
            max_model_len=min(facts.max_model_len, layout.num_blocks * layout.block_size),
            grammars=self._grammars,
            passes=self._external.role != "both",
            limits=replace(LIMITS, sees=True, tasks=facts.tasks, dimension=facts.dimension),
            note=lambda: "; ".join(filter(None, (facts.note, cache.note, NO_OFFER * engine.offers_nothing))),
            adapters=watch.adapters,
            root=facts.root,
            greedy=facts.greedy,
        )


def _events(rank: Rank) -> VllmStream | None:
    return VllmStream(rank.events, rank.replay, CONNECT_TIMEOUT_S) if rank.events else None
