"""`baton events bridge` beside a real `vllm serve`: what the engine has cached is found, and nothing else."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from baton.events.event_source import EventSource
from baton.events.vllm_bridge import Bridge
from engine.vllm.events.stream import VllmStream
from runtime.blocks.block_hash import block_hashes
from runtime.end_task import end_tasks
from runtime.nats.client import NatsClient
from tests.baton.events.cluster import TTL_S, Router
from tests.vllm.environment import LIMIT_S, PATIENCE_S
from tests.vllm.server import BLOCK, MODEL, NUM_BLOCKS, VllmServer, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(LIMIT_S)]


class Scene:
    def __init__(self, nats: NatsClient, server: VllmServer) -> None:
        self.server = server
        self.router = Router(nats)
        self._stream = VllmStream(server.endpoint, server.replay_endpoint, "", timeout_s=60)
        self._source = EventSource(nats, "vllm", MODEL, BLOCK, TTL_S)
        self.bridge = Bridge(nats, self._stream, self._source, BLOCK)
        self.running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.router.start()
        await self._stream.open()
        await self._source.start(10)
        self.running = asyncio.create_task(self.bridge.run())

    def found(self, token_ids: list[int]) -> int:
        """Leading blocks of a prompt that a router finds."""
        hashes = block_hashes(np.array(token_ids, dtype=np.uint32), BLOCK)
        return max(self.router.indexer.match(hashes).values(), default=0)

    async def until_found(self, token_ids: list[int], count: int) -> None:
        assert self.running is not None
        running = self.running
        await self.router.until(lambda: self.found(token_ids) == count or running.done(), timeout_s=PATIENCE_S)
        assert self.found(token_ids) == count

    async def close(self) -> None:
        if self.running is not None:
            await end_tasks(self.running)
        await self._stream.close()
        await self._source.close()
        await self.router.close()


@pytest.fixture
async def server(vllm_python: Path, tmp_path: Path) -> AsyncIterator[VllmServer]:
    server = VllmServer(vllm_python, tmp_path / "vllm.log")
    try:
        await server.start()
        yield server
    finally:
        await server.close()


async def test_routers_find_what_a_real_engine_has_cached_until_it_is_evicted_forgotten_or_killed(
    nats: NatsClient, server: VllmServer
) -> None:
    early, late = prompt(3, start=1000), prompt(2, start=5000)
    await server.complete(early)  # before the bridge: a replay tells
    scene = Scene(nats, server)
    try:
        await scene.start()
        await scene.until_found(early, 3)
        await server.complete(early + late)
        await scene.until_found(early + late, 5)
        for number in range(NUM_BLOCKS // 8 + 1):
            await server.complete(prompt(8, start=10_000 + 8 * BLOCK * number))
        await scene.until_found(early, 0)  # evicted
        last = prompt(8, start=10_000 + 8 * BLOCK * number)
        await scene.until_found(last, 8)
        await server.forget()
        await server.complete(late)
        await scene.until_found(late, 2)
        assert scene.found(last) == 0
        assert (scene.bridge.cache.num_malformed, scene.bridge.cache.num_losses) == (0, 0)
        assert not scene.bridge.cache.blocks.skipped
        assert scene.router.indexer.refused_events == 0
        server.kill()
        await scene.until_found(late, 0)
    finally:
        await scene.close()
