"""What a followed worker says of itself, state by state; batches are applied in each state but one."""

from collections.abc import AsyncIterator

import pytest

from baton_proto.kv_events import MAJOR, KvEventBatch, Stored
from baton_proto.worker import SnapshotChunk
from router.index.followed_worker import FollowedWorker, State
from router.index.indexer import Indexer
from runtime.nats.client import NatsClient

KEY = ("w", 1)


async def no_snapshot(worker_id: str, incarnation: int) -> AsyncIterator[SnapshotChunk]:
    raise AssertionError("nobody heals here")
    yield


@pytest.fixture
def worker() -> FollowedWorker:
    return FollowedWorker(KEY, no_snapshot)


def batch(event_id: int) -> KvEventBatch:
    hashes = bytes([event_id] * 8)
    return KvEventBatch(MAJOR, "w", 1, event_id, 0.0, [Stored(None, hashes, hashes)])


@pytest.mark.parametrize(
    ("state", "note", "contained"),
    [
        (State.FOLLOWING, "", 0),
        (State.HOLED, "behind: event 0 of 3", 0),
        (State.STALE, "a snapshot is being taken", None),
        (State.FILLING, "a snapshot is being taken", None),
    ],
)
def test_each_state_has_its_note(worker: FollowedWorker, state: State, note: str, contained: int | None) -> None:
    worker.state = state
    worker.expect(3)
    assert (worker.note, worker.contained, worker.settled) == (note, contained, False)


@pytest.mark.parametrize("state", State)
def test_batches_wait_only_while_a_snapshot_fills_the_tree(worker: FollowedWorker, state: State) -> None:
    indexer = Indexer(NatsClient.__new__(NatsClient), no_snapshot)
    worker.state = state
    for event_id in (1, 2):
        worker.feed.offer(batch(event_id))
        indexer._apply_ready(worker)
    waits = state is State.FILLING
    assert worker.feed.applied == (0 if waits else 2)
    worker.state = State.STALE  # the snapshot did not come: all is as it was
    indexer._apply_ready(worker)
    assert (worker.feed.applied, indexer.tree.num_blocks_of(KEY)) == (2, 2)
