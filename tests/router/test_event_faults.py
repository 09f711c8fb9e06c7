"""Whatever goes wrong with the workers' events, the radix tree ends equal to the workers' own block tables.

Everything is drawn from a seed; a failure is repeated by running its seed again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from baton.service.local.nats_server import NatsServer
from runtime.nats.client import connect
from tests.router.event_faults import FaultyCluster

Build = Callable[[int], FaultyCluster]


@pytest.fixture
async def build(nats_server: NatsServer) -> AsyncIterator[Build]:
    async with AsyncExitStack() as closing:
        connections = []
        for name in ("router", "workers"):
            nats = await connect(nats_server.url, name, timeout_s=60)
            closing.push_async_callback(nats.close)
            connections.append(nats)

        def build(seed: int) -> FaultyCluster:
            cluster = FaultyCluster(connections[0], connections[1], seed)
            closing.push_async_callback(cluster.close)
            return cluster

        yield build


async def work(cluster: FaultyCluster, steps: int) -> None:
    for step in range(steps):
        cluster.rng.choice(cluster.workers).work(cluster.rng)
        if step % 20 == 0:
            cluster.report_loads()
            await asyncio.sleep(0.002)


async def work_under(cluster: FaultyCluster, fault: str, share: float) -> None:
    """400 steps, and as many more as it takes until the fault has struck: messages are under way for a while."""
    struck = 0

    def strikes(what: str, probability: float) -> bool:
        nonlocal struck
        hit = what == fault and cluster.faults.rng.random() < share
        struck += hit
        return hit

    cluster.faults.strikes = strikes  # type: ignore[method-assign]
    await work(cluster, 400)
    async with asyncio.timeout(60):
        while not struck:
            await work(cluster, 20)
    cluster.faults.strikes = lambda what, probability: False  # type: ignore[method-assign]


async def calm_down(cluster: FaultyCluster, timeout_s: float = 60.0) -> None:
    """No new faults; what has happened is to be found and mended."""
    cluster.faults.on = False
    for worker in cluster.workers:
        worker.work(cluster.rng)  # lets go what a wire held back
        assert await worker.publisher.flush(5)
    await cluster.until_right(timeout_s)
    for worker in cluster.workers:
        assert worker.manager.check_integrity() == []
    assert {worker.key for worker in cluster.workers} >= set(cluster.indexer.tree.workers)


@pytest.mark.parametrize("seed", range(6))
async def test_the_tree_equals_the_workers_block_tables_after_faults_from_a_seed(
    build: Build, nats_server: NatsServer, seed: int
) -> None:
    cluster = build(seed)
    await cluster.start()
    disasters: dict[int, Callable[[], Awaitable[None]]] = {
        300: lambda: cluster.restart_worker(cluster.rng.randrange(4)),
        500: lambda: nats_server.restart(lose_storage=False),
        800: cluster.restart_router,
        1000: lambda: cluster.restart_worker(cluster.rng.randrange(4)),
        1200: lambda: nats_server.restart(lose_storage=True),
    }
    done = 0
    for at, disaster in disasters.items():
        await work(cluster, at - done)
        await disaster()
        done = at
    await work(cluster, 300)
    counts = cluster.faults.counts
    assert len(counts) >= 9, f"the seed is too tame: {counts}"
    await calm_down(cluster)


async def test_what_the_stream_has_is_fetched_from_it_and_needs_no_snapshot(build: Build) -> None:
    cluster = build(7)
    faults = cluster.faults
    faults.on = False
    await cluster.start()
    await cluster.until_right(5)
    before = [worker.snapshots for worker in cluster.workers]
    await work_under(cluster, "lost behind the stream", 0.2)
    await calm_down(cluster)
    assert cluster.indexer.gaps > 0
    assert [worker.snapshots for worker in cluster.workers] == before


async def test_what_the_stream_never_had_is_made_good_by_a_snapshot(build: Build) -> None:
    cluster = build(8)
    faults = cluster.faults
    faults.on = False
    await cluster.start()
    await cluster.until_right(5)
    before = sum(worker.snapshots for worker in cluster.workers)
    await work_under(cluster, "lost before the stream", 0.1)
    await calm_down(cluster)
    assert sum(worker.snapshots for worker in cluster.workers) > before


@pytest.mark.slow
async def test_the_tree_is_right_again_after_nats_was_down_for_long(build: Build, nats_server: NatsServer) -> None:
    cluster = build(9)
    cluster.faults.on = False
    await cluster.start()
    await work(cluster, 200)
    await nats_server.stop()
    began_s = asyncio.get_running_loop().time()
    while asyncio.get_running_loop().time() - began_s < 10:
        await work(cluster, 20)
        await asyncio.sleep(0.2)
    await nats_server.start()
    await calm_down(cluster, timeout_s=60)
