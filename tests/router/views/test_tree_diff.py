"""The tree against the workers' own tables: exactly the blocks that differ, at the same event, in bounded time."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
from hypothesis import given, strategies as st

import router.views.tree_diff
from baton_proto.generated import inference_pb2 as pb
from baton_proto.kv_events import HOST, Moved, Stored
from baton_proto.worker import SnapshotChunk
from router.views.tree_diff import TreeDiff, difference
from runtime.blocks.block_hash import sequence_hashes
from runtime.errors import WorkerLostError
from tests.router.indexed_cluster import Cluster, FakeWorker, blocks, raw, removed, stored

EQUAL, DIFFERENT = pb.DIFF_VERDICT_EQUAL, pb.DIFF_VERDICT_DIFFERENT
UNREACHABLE, MOVING = pb.DIFF_VERDICT_UNREACHABLE, pb.DIFF_VERDICT_MOVING


async def compare(
    cluster: Cluster, timeout_s: float = 60.0, max_blocks: int = 10, *worker_ids: str
) -> list[pb.WorkerDiff]:
    diff = TreeDiff(cluster.indexer, cluster._fetch, lambda: [worker.key for worker in cluster.workers.values()])
    wanted = pb.DiffRequest(worker_ids=worker_ids, max_blocks=max_blocks)
    return [worker async for worker in diff.compare(wanted, timeout_s)]


async def with_blocks(cluster: Cluster, worker_id: str = "w") -> FakeWorker:
    worker = await cluster.add(worker_id)
    worker.publish(worker.cache.store([1, 2, 3]), worker.cache.store([1, 2, 4], 2))
    await cluster.until_equal(worker)
    return worker


def names(path: list[int], first: int) -> list[int]:
    return sequence_hashes(blocks(path))[first:].tolist()


async def test_what_agrees_is_equal(cluster: Cluster) -> None:
    await with_blocks(cluster, "b")
    await with_blocks(cluster, "a")
    first, second = await compare(cluster)
    assert (first.worker_id, second.worker_id) == ("a", "b")
    assert (first.verdict, first.event_id, first.tree_event_id, first.attempts) == (EQUAL, 1, 1, 1)
    assert (first.worker_blocks, first.tree_blocks, first.missing, first.extra, first.changed) == (4, 4, 0, 0, 0)


async def test_a_worker_that_is_named_twice_is_compared_once(cluster: Cluster) -> None:
    await with_blocks(cluster, "w")
    assert [found.worker_id for found in await compare(cluster, 5, 10, "w", "w")] == ["w"]


async def test_an_event_that_the_worker_never_published_is_found(cluster: Cluster) -> None:
    worker = await with_blocks(cluster)
    await raw(cluster, worker, 2, stored([1, 2, 3, 5, 6], known=3), removed([1, 2, 4], kept=2), store=False)
    await cluster.until(lambda: cluster.indexer.last_event_id(worker.key) == 2)
    (found,) = await compare(cluster)
    assert (found.verdict, found.event_id, found.tree_event_id) == (DIFFERENT, 1, 2)
    assert "applied event 2, the worker has published 1" in found.note
    assert (found.missing, found.extra) == (1, 2)
    assert list(found.extra_hashes) == names([1, 2, 3, 5, 6], 3), "parents before children"
    assert list(found.missing_hashes) == names([1, 2, 4], 2)


async def test_a_difference_is_found_when_the_numbers_agree_again(cluster: Cluster) -> None:
    worker = await with_blocks(cluster)
    await raw(cluster, worker, 2, stored([8, 9]), store=False)
    await cluster.until(lambda: cluster.indexer.last_event_id(worker.key) == 2)
    worker.publish(worker.cache.store([7]))  # its own event 2, which the router takes for a duplicate
    assert await worker.publisher.flush(5)
    await cluster.router_nats.flush()
    (found,) = await compare(cluster, max_blocks=1)
    assert (found.verdict, found.event_id, found.tree_event_id, found.note) == (DIFFERENT, 2, 2, "")
    assert (found.missing, found.extra, list(found.extra_hashes)) == (1, 2, names([8, 9], 0)[:1])


async def test_events_in_flight_are_waited_for(cluster: Cluster) -> None:
    """The snapshot is ahead of the tree: its event comes while the comparison waits, and another right behind it."""
    worker = await with_blocks(cluster)
    late, later = worker.cache.store([5]), worker.cache.store([6])

    async def snapshot() -> AsyncIterator[SnapshotChunk]:
        runs = [run for run in worker.cache.tree.dump(worker.key) if run != later]
        yield SnapshotChunk(1, 2, runs, last=True)
        await raw(cluster, worker, 2, late, store=False)
        await raw(cluster, worker, 3, later, store=False)

    worker.snapshot = snapshot  # type: ignore[method-assign]
    (found,) = await compare(cluster)
    assert (found.verdict, found.event_id, found.tree_event_id, found.worker_blocks) == (EQUAL, 2, 2, 5)
    await cluster.until(lambda: cluster.indexer.last_event_id(worker.key) == 3)


async def test_a_snapshot_that_the_tree_has_overtaken_is_taken_again(cluster: Cluster) -> None:
    worker = await with_blocks(cluster)
    original, taken = worker.snapshot, 0

    async def snapshot() -> AsyncIterator[SnapshotChunk]:
        nonlocal taken
        taken += 1
        chunks = [chunk async for chunk in original()]
        if taken <= 2:  # it is a while on its way
            worker.publish(worker.cache.store([10 + taken]))
            await cluster.until(lambda: cluster.indexer.last_event_id(worker.key) == 1 + taken)
        for chunk in chunks:
            yield chunk

    worker.snapshot = snapshot  # type: ignore[method-assign]
    (found,) = await compare(cluster)
    assert (found.verdict, found.attempts, found.event_id, found.worker_blocks) == (EQUAL, 3, 3, 6)


async def test_under_steady_traffic_no_difference_is_made_up(cluster: Cluster) -> None:
    worker = await with_blocks(cluster)
    going = True

    async def traffic() -> None:
        number = 100
        while going:
            number += 1
            worker.publish(worker.cache.store([number]))
            await asyncio.sleep(0.003)

    task = asyncio.create_task(traffic())
    verdicts = [(await compare(cluster, 5))[0].verdict for _ in range(20)]
    going = False
    await task
    assert DIFFERENT not in verdicts
    assert EQUAL in verdicts


async def test_a_worker_that_gives_no_snapshot_is_unreachable_and_the_others_are_compared(cluster: Cluster) -> None:
    await with_blocks(cluster, "good")
    silent, lost = await with_blocks(cluster, "silent"), await with_blocks(cluster, "lost")
    silent.pause = asyncio.Event()

    async def snapshot() -> AsyncIterator[SnapshotChunk]:
        yield SnapshotChunk(1, 1, [], last=False)
        raise WorkerLostError("lost", "the connection broke")

    lost.snapshot = snapshot  # type: ignore[method-assign]
    by_id = {found.worker_id: found for found in await compare(cluster, 0.5, 10, "good", "silent", "lost", "nobody")}
    assert by_id["good"].verdict == EQUAL
    assert (by_id["silent"].verdict, by_id["silent"].note) == (UNREACHABLE, "no answer in time")
    assert (by_id["lost"].verdict, by_id["lost"].note) == (UNREACHABLE, "the connection broke")
    assert (by_id["nobody"].verdict, by_id["nobody"].note) == (UNREACHABLE, "the router knows no such worker")


async def test_an_event_that_never_comes_ends_with_the_time(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.views.tree_diff, "CATCH_UP_S", 0.05)
    worker = await with_blocks(cluster)

    async def snapshot() -> AsyncIterator[SnapshotChunk]:
        yield SnapshotChunk(1, 5, [], last=True)

    worker.snapshot = snapshot  # type: ignore[method-assign]
    (found,) = await compare(cluster, 0.4)
    assert (found.verdict, found.note) == (MOVING, "event 5 has not reached the tree")
    assert found.attempts > 1


pairs = st.dictionaries(st.integers(1, 30), st.integers(1, 3), max_size=20)


@given(pairs, pairs)
def test_the_difference_is_that_of_the_two_sets(worker: dict[int, int], tree: dict[int, int]) -> None:
    found = difference(runs_of(worker), runs_of(tree))
    assert found.missing.tolist() == [name for name in worker if name not in tree]
    assert found.extra.tolist() == [name for name in tree if name not in worker]
    assert found.changed.tolist() == [name for name in worker if name in tree and worker[name] != tree[name]]
    assert (found.num_worker, found.num_tree) == (len(worker), len(tree))


def test_blocks_in_another_home_than_the_tree_says_are_moved() -> None:
    hashes = np.arange(1, 7, dtype="<u8").tobytes()
    worker = [Stored(None, hashes[:16], hashes[:16]), Stored(2, hashes[16:], hashes[16:], HOST)]
    tree = [Stored(None, hashes[:24], hashes[:24]), Stored(3, hashes[24:40], hashes[24:40], HOST)]
    found = difference(worker, tree)
    assert (found.moved.tolist(), found.missing.tolist(), found.extra.tolist(), found.changed.tolist()) == (
        [3],
        [6],
        [],
        [],
    )
    assert difference(worker, worker).moved.tolist() == []
    assert difference([], []).moved.tolist() == []


async def test_a_block_in_another_home_makes_a_difference(cluster: Cluster) -> None:
    worker = await with_blocks(cluster)
    name = sequence_hashes(blocks([1, 2, 3]))[2:]
    cluster.indexer.tree.apply(worker.key, Moved(name.tobytes(), HOST))
    (found,) = await compare(cluster)
    assert (found.verdict, found.moved, found.moved_hashes) == (DIFFERENT, 1, name.tolist())


def runs_of(table: dict[int, int]) -> list[Stored]:
    """Sequence hash -> block hash, as runs of three."""
    names, hashes = (np.array(list(part), dtype="<u8") for part in (table.keys(), table.values()))
    starts = range(0, len(table), 3)
    return [Stored(None, hashes[i : i + 3].tobytes(), names[i : i + 3].tobytes()) for i in starts]
