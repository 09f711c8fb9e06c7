"""Compares the radix tree with each worker's own block table: `baton events diff`.

Invariant: the two are compared only when the tree has applied exactly the events that the worker's snapshot contains.
Because both go on changing, the tree is followed before the worker is asked for a snapshot, and copied when the tree
reaches the snapshot's event id. If the tree was past that event already, the worker is asked again.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from baton_proto.generated import inference_pb2 as pb
from baton_proto.kv_events import HASH_BYTES, Stored
from baton_proto.worker import SnapshotChunk
from router.index.followed_worker import FetchSnapshot
from router.index.indexer import Indexer
from runtime.discovery.worker_key import WorkerKey
from runtime.end_task import end_tasks
from runtime.errors import WorkerLostError
from runtime.within import happens

AT_ONCE: Final = 4  # workers compared at the same time
CATCH_UP_S: Final = 2.0  # the tree's time to reach the snapshot's event before the worker is asked again
SETTLE_S: Final = 0.02  # between two attempts

Hashes = NDArray[np.uint64]


@dataclass(slots=True)
class _Compared:
    """The comparison of one worker while it is in progress."""

    key: WorkerKey
    attempts: int = 0
    event_id: int = 0  # of the last snapshot
    last_problem: str = ""
    runs: list[Stored] = field(default_factory=list)  # what the worker's last snapshot lists


class TreeDiff:
    def __init__(self, indexer: Indexer, fetch_snapshot: FetchSnapshot, workers: Callable[[], Iterable[WorkerKey]]):
        self._indexer = indexer
        self._fetch_snapshot = fetch_snapshot
        self._workers = workers

    async def compare(self, wanted: pb.DiffRequest, timeout_s: float) -> AsyncGenerator[pb.WorkerDiff, None]:
        """Yields one message for each wanted worker, all within `timeout_s` seconds."""
        keys = {key[0]: key for key in self._workers()}
        until_s = time.monotonic() + timeout_s
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(worker_id: str) -> pb.WorkerDiff:
            if worker_id not in keys:
                return _verdict(worker_id, 0, pb.DIFF_VERDICT_UNREACHABLE, "the router knows no such worker")
            async with slots:
                return await self._one(keys[worker_id], until_s, wanted.max_blocks)

        tasks = [
            asyncio.create_task(one(worker_id)) for worker_id in (dict.fromkeys(wanted.worker_ids) or sorted(keys))
        ]
        try:
            for task in tasks:
                yield await task
        finally:
            await end_tasks(*tasks)

    async def _one(self, key: WorkerKey, until_s: float, max_blocks: int) -> pb.WorkerDiff:
        compared = _Compared(key)
        try:
            async with asyncio.timeout(until_s - time.monotonic()):
                while True:
                    compared.attempts += 1
                    tree_runs, tree_event_id = await self._attempt(compared)
                    if tree_runs is not None:
                        return await _differences(compared, tree_runs, tree_event_id, max_blocks)
                    await asyncio.sleep(SETTLE_S)
        except TimeoutError:
            if not compared.last_problem:
                return _verdict(*key, pb.DIFF_VERDICT_UNREACHABLE, "no answer in time", compared)
            return _verdict(*key, pb.DIFF_VERDICT_MOVING, compared.last_problem, compared)
        except WorkerLostError as error:
            return _verdict(*key, pb.DIFF_VERDICT_UNREACHABLE, error.reason, compared)

    async def _attempt(self, compared: _Compared) -> tuple[list[Stored] | None, int]:
        """Returns the tree's runs at the snapshot's event and the id of the last event that the tree has applied. The
        runs are None when the tree was not caught at the snapshot's event. Raises WorkerLostError."""
        key, indexer = compared.key, self._indexer
        follower = _Follower(indexer, key)
        before = indexer.contained(key)
        with indexer.following(key, follower.seen):
            chunks = self._fetch_snapshot(*key)
            compared.runs = await follower.snapshot(chunks)
            compared.event_id = event_id = follower.event_id
            if before is not None and before > event_id and indexer.contained(key) == before:
                return list(indexer.tree.dump(key)), before  # the tree has events that the worker never published
            compared.last_problem = f"event {event_id} has not reached the tree"
            await happens(follower.caught, CATCH_UP_S)
        if follower.runs is None and follower.caught.is_set():
            compared.last_problem = "its events go on too fast to compare"
        return follower.runs, event_id


class _Follower:
    """Copies the tree's runs at the moment when the tree has applied the snapshot's event."""

    def __init__(self, indexer: Indexer, key: WorkerKey) -> None:
        self.event_id = -1  # of the snapshot; -1: not known yet
        self.runs: list[Stored] | None = None  # the tree's runs at that event; None: not there yet, or missed
        self.caught = asyncio.Event()  # set when the tree has reached that event or skipped it
        self._indexer = indexer
        self._key = key

    async def snapshot(self, chunks: AsyncIterator[SnapshotChunk]) -> list[Stored]:
        runs: list[Stored] = []
        async for chunk in chunks:
            if self.event_id < 0:
                self.event_id = chunk.event_id
                if (contained := self._indexer.contained(self._key)) is not None:
                    self.seen(contained)
            runs += chunk.runs
        return runs

    def seen(self, event_id: int) -> None:
        """Takes note that the tree has applied `event_id`."""
        if self.event_id < 0 or self.caught.is_set() or event_id < self.event_id:
            return
        if event_id == self.event_id:
            self.runs = list(self._indexer.tree.dump(self._key))
        self.caught.set()


async def _differences(
    compared: _Compared, tree_runs: Sequence[Stored], tree_event_id: int, max_blocks: int
) -> pb.WorkerDiff:
    found = await asyncio.to_thread(difference, compared.runs, tree_runs)
    equal = not any(map(len, (found.missing, found.extra, found.changed, found.moved)))
    note = ""
    if tree_event_id > compared.event_id:
        equal = False
        note = f"the tree has applied event {tree_event_id}, the worker has published {compared.event_id}"
    return pb.WorkerDiff(
        worker_id=compared.key[0],
        incarnation=compared.key[1],
        verdict=pb.DIFF_VERDICT_EQUAL if equal else pb.DIFF_VERDICT_DIFFERENT,
        event_id=compared.event_id,
        tree_event_id=tree_event_id,
        worker_blocks=found.num_worker,
        tree_blocks=found.num_tree,
        missing=len(found.missing),
        extra=len(found.extra),
        changed=len(found.changed),
        missing_hashes=found.missing[:max_blocks].tolist(),
        extra_hashes=found.extra[:max_blocks].tolist(),
        changed_hashes=found.changed[:max_blocks].tolist(),
        moved=len(found.moved),
        moved_hashes=found.moved[:max_blocks].tolist(),
        attempts=compared.attempts,
        note=note,
    )


def _verdict(
    worker_id: str, incarnation: int, verdict: "pb.DiffVerdict", note: str, compared: _Compared | None = None
) -> pb.WorkerDiff:
    return pb.WorkerDiff(
        worker_id=worker_id,
        incarnation=incarnation,
        verdict=verdict,
        event_id=compared.event_id if compared else 0,
        attempts=compared.attempts if compared else 0,
        note=note,
    )


@dataclass(frozen=True, slots=True)
class Difference:
    """Sequence hashes in the order of the side that lists them: parents before children."""

    missing: Hashes
    extra: Hashes
    changed: Hashes
    moved: Hashes
    num_worker: int
    num_tree: int


def difference(worker_runs: Iterable[Stored], tree_runs: Iterable[Stored]) -> Difference:
    """Blocks that only the worker has (missing), that only the tree has (extra), whose block hashes differ (changed),
    and whose homes differ (moved)."""
    worker, worker_blocks, worker_homes = _columns(worker_runs)
    tree, tree_blocks, tree_homes = _columns(tree_runs)
    _, in_worker, in_tree = np.intersect1d(worker, tree, return_indices=True)

    def where(differ: NDArray[np.bool_]) -> Hashes:
        return worker[np.sort(in_worker[differ])]

    return Difference(
        missing=np.delete(worker, in_worker),
        extra=np.delete(tree, in_tree),
        changed=where(worker_blocks[in_worker] != tree_blocks[in_tree]),
        moved=where(worker_homes[in_worker] != tree_homes[in_tree]),
        num_worker=len(worker),
        num_tree=len(tree),
    )


def _columns(runs: Iterable[Stored]) -> tuple[Hashes, Hashes, NDArray[np.int64]]:
    """Sequence hashes, block hashes and homes of all runs [num_blocks], each block once."""
    listed = list(runs)
    sequences = np.frombuffer(b"".join(run.sequence_hashes for run in listed), dtype="<u8")
    blocks = np.frombuffer(b"".join(run.block_hashes for run in listed), dtype="<u8")
    homes = np.repeat([run.home for run in listed], [len(run.sequence_hashes) // HASH_BYTES for run in listed])
    _, first = np.unique(sequences, return_index=True)
    first.sort()
    return sequences[first], blocks[first], homes.astype(np.int64)[first]
