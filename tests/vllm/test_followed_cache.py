"""The events of a real `vllm serve`: what the engine has cached is found, and nothing else."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.engine.vllm.events.follower import Follower
from tests.vllm.environment import LIMIT_S, PATIENCE_S
from tests.vllm.server import BLOCK, NUM_BLOCKS, VllmServer, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(LIMIT_S)]


@pytest.fixture
async def server(vllm_python: Path, tmp_path: Path) -> AsyncIterator[VllmServer]:
    server = VllmServer(vllm_python, tmp_path / "vllm.log")
    try:
        await server.start()
        yield server
    finally:
        await server.close()


async def test_what_a_real_engine_has_cached_is_found_until_it_is_evicted_forgotten_or_killed(
    server: VllmServer,
) -> None:
    early, late = prompt(3, start=1000), prompt(2, start=5000)
    await server.complete(early)  # before anybody listens: a replay tells
    follower = Follower(server.endpoint, server.replay_endpoint, BLOCK, timeout_s=60)

    async def until_found(token_ids: list[int], count: int) -> None:
        await follower.until(lambda: follower.found(token_ids) == count, timeout_s=PATIENCE_S)

    try:
        await follower.stream.open()
        follower.start()
        await until_found(early, 3)
        await server.complete(early + late)
        await until_found(early + late, 5)
        for number in range(NUM_BLOCKS // 8 + 1):
            await server.complete(prompt(8, start=10_000 + 8 * BLOCK * number))
        await until_found(early, 0)  # evicted
        last = prompt(8, start=10_000 + 8 * BLOCK * number)
        await until_found(last, 8)
        await server.forget()
        await server.complete(late)
        await until_found(late, 2)
        assert follower.found(last) == 0
        assert (follower.cache.num_malformed, follower.cache.num_losses) == (0, 0)
        assert not follower.cache.blocks.skipped
        server.kill()
        await until_found(late, 0)
    finally:
        await follower.close()
