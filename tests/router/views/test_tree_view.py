"""Listings of the radix tree: every run with its owners, the most used first, within limits, while the tree moves."""

import numpy as np

from baton_proto.generated import inference_pb2 as pb
from baton_proto.kv_events import Stored
from router.index.prefix_hits import PrefixHits
from router.index.radix_tree import RadixTree
from router.views.tree_view import SLICE_RUNS, TreeView
from runtime.blocks.block_hash import sequence_hashes
from runtime.discovery.worker_key import WorkerKey

A: WorkerKey = ("a", 1)
B: WorkerKey = ("b", 7)


def hashes(path: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(path, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def store(tree: RadixTree, worker: WorkerKey, *path: int) -> None:
    blocks = hashes(list(path))
    run = Stored(None, blocks.tobytes(), sequence_hashes(blocks).tobytes())
    tree.apply_stored(worker, run.parent, run.block_hashes, run.sequence_hashes)


def name(*path: int) -> int:
    """Sequence hash of the path's last block."""
    return int(sequence_hashes(hashes(list(path)))[-1])


def reuse(tree: RadixTree, hits: PrefixHits, *path: int) -> None:
    hits.count(tree.find(hashes(list(path))).last_block)


async def listing(
    tree: RadixTree, hits: PrefixHits | None = None, **limits: int
) -> tuple[pb.TreeSummary, list[pb.TreeRun]]:
    chunks = [chunk async for chunk in TreeView("r", 16, tree, hits or PrefixHits()).listing(pb.TreeRequest(**limits))]
    assert all(not chunk.HasField("summary") for chunk in chunks[1:])
    return chunks[0].summary, [run for chunk in chunks for run in chunk.runs]


def owned(owners: object) -> dict[str, int]:
    return {owner.worker_id: owner.blocks for owner in owners}  # type: ignore[attr-defined]


def forked() -> RadixTree:
    """1 2 3 4 with 5 6 or 7 behind it; and 9."""
    tree = RadixTree()
    store(tree, A, 1, 2, 3, 4, 5, 6)
    store(tree, A, 1, 2, 3, 4, 7)
    store(tree, B, 1, 2)
    store(tree, B, 9)
    return tree


async def test_runs_come_after_their_parents_with_place_size_and_owners() -> None:
    summary, runs = await listing(forked())
    assert (summary.router_id, summary.block_size, summary.blocks, summary.runs) == ("r", 16, 8, 4)
    assert (owned(summary.workers), summary.first_runs) == ({"a": 7, "b": 3}, 2)
    by_name = {run.first_hash: run for run in runs}
    trunk, long, short, other = (by_name[name(*path)] for path in ((1,), (1, 2, 3, 4, 5), (1, 2, 3, 4, 7), (9,)))
    assert (trunk.parent, trunk.depth, trunk.first_block, trunk.blocks, trunk.children) == (0, 1, 0, 4, 2)
    assert owned(trunk.owners) == {"a": 4, "b": 2}
    assert (trunk.owners[1].worker_id, trunk.owners[1].incarnation) == B
    assert (long.parent, long.depth, long.first_block, long.blocks, long.children) == (trunk.number, 2, 4, 2, 0)
    assert (short.parent, owned(short.owners), owned(other.owners)) == (trunk.number, {"a": 1}, {"b": 1})
    assert [run.number for run in runs] == [1, 2, 3, 4]


async def test_an_empty_tree_has_a_summary_alone() -> None:
    summary, runs = await listing(RadixTree())
    assert (summary.blocks, summary.runs, runs) == (0, 0, [])


async def test_hits_count_on_every_run_up_to_the_reused_block_and_the_most_used_come_first() -> None:
    tree, hits = forked(), PrefixHits()
    for _ in range(3):
        reuse(tree, hits, 1, 2, 3, 4, 7, 8)  # as far as it is cached
    reuse(tree, hits, 1, 2, 100)
    reuse(tree, hits, 100)  # nothing to reuse
    summary, runs = await listing(tree, hits, max_hottest=5)
    assert [(run.first_hash, run.hits) for run in runs] == [
        (name(1), 4),
        (name(1, 2, 3, 4, 7), 3),
        (name(1, 2, 3, 4, 5), 0),
        (name(9), 0),
    ]
    hottest = [(prefix.last_hash, prefix.blocks, prefix.hits, owned(prefix.owners)) for prefix in summary.hottest]
    assert hottest == [
        (name(1, 2, 3, 4, 7), 5, 3, {"a": 1}),
        (name(1, 2), 2, 1, {"a": 4, "b": 2}),
    ]


async def test_a_reused_prefix_that_was_evicted_is_not_shown() -> None:
    tree, hits = forked(), PrefixHits()
    reuse(tree, hits, 9)
    tree.clear(B)
    summary, _ = await listing(tree, hits, max_hottest=5)
    assert not summary.hottest


async def test_limits_of_depth_children_and_runs() -> None:
    tree = forked()
    assert [run.depth for run in (await listing(tree, max_depth=1))[1]] == [1, 1]
    _, runs = await listing(tree, max_children=1)
    assert [run.first_hash for run in runs] == [name(1), name(1, 2, 3, 4, 5)], "the longest when none is used"
    assert len((await listing(tree, max_runs=3))[1]) == 3


async def test_a_long_listing_comes_in_slices_and_runs_that_leave_meanwhile_are_left_out() -> None:
    tree = RadixTree()
    for i in range(1, 2 * SLICE_RUNS + 1):
        store(tree, A if i % 2 else B, i)
    runs: list[pb.TreeRun] = []
    chunks = 0
    async for chunk in TreeView("r", 16, tree, PrefixHits()).listing(pb.TreeRequest()):
        chunks += 1
        runs += chunk.runs
        tree.remove_worker(B)
    assert chunks > 1
    later = runs[SLICE_RUNS:]
    assert later
    assert all(owned(run.owners) == {"a": 1} for run in later)
