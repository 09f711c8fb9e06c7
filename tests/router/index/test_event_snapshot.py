"""A worker's blocks from the stream alone, whatever the stream has forgotten."""

import random

from baton.service.local.nats_server import NatsServer
from baton_proto.discovery import EVENTS_ROLE, MAJOR, WorkerRecord
from baton_proto.kv_events import MAJOR as EVENTS_MAJOR, Cleared, KvEvent, KvEventBatch, Stored, encode_batch
from router.index.event_snapshot import snapshot_from_stream
from router.workers.load import LoadLedger
from router.workers.pool import WorkerPool
from runtime.discovery.directory import Change
from runtime.kv_events.publisher import stream_config
from runtime.kv_events.stored_feed import REORDER_BATCHES, StoredFeed
from runtime.nats.client import NatsClient, connect
from runtime.nats.subjects import kv_events_subject
from tests.router.indexed_cluster import Cache, stored

KEY = ("w", 7)


def batch(event_id: int, *events: KvEvent, incarnation: int = 7) -> KvEventBatch:
    return KvEventBatch(EVENTS_MAJOR, "w", incarnation, event_id, 0.0, list(events))


async def snapshot(server: NatsServer, batches: list[KvEventBatch]) -> tuple[int, set[Stored]]:
    nats = await connect(server.url, "test", timeout_s=60)
    try:
        await nats.ensure_stream(stream_config("default"))
        for stored_batch in batches:
            await nats.publish_stored(kv_events_subject("default", "w"), encode_batch(stored_batch))
        return await read(nats)
    finally:
        await nats.close()


async def read(nats: NatsClient) -> tuple[int, set[Stored]]:
    chunks = [chunk async for chunk in snapshot_from_stream(nats, KEY)]
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert {chunk.incarnation for chunk in chunks} == {7}
    (event_id,) = {chunk.event_id for chunk in chunks}
    return event_id, {run for chunk in chunks for run in chunk.runs}


async def test_a_complete_stream_gives_exactly_what_the_worker_holds(nats_server: NatsServer) -> None:
    cache, rng = Cache(*KEY), random.Random(1)
    batches = [batch(event_id, *cache.random_event(rng)) for event_id in range(1, 200)]
    batches[50:52] = batches[51], batches[50]  # sent again out of order
    batches.insert(80, batches[70])
    batches.insert(30, batch(31, stored([9, 9]), incarnation=6))  # of the process before
    event_id, runs = await snapshot(nats_server, batches)
    assert event_id == 199
    assert runs == set(cache.tree.dump(KEY))


async def test_a_stream_that_forgot_its_beginning_is_exact_from_the_last_clearing_on(nats_server: NatsServer) -> None:
    batches = [
        batch(41, stored([1, 2, 3], known=2)),
        batch(42, Cleared(), stored([5])),
        batch(43, stored([5, 6], known=1)),
    ]
    assert await snapshot(nats_server, batches) == (43, {stored([5, 6])})


async def test_no_stream_gives_an_empty_snapshot(nats_server: NatsServer) -> None:
    nats = await connect(nats_server.url, "test", timeout_s=60)
    assert await read(nats) == (0, set())
    await nats.close()


def test_a_stored_feed_hands_out_all_batches_by_id_and_passes_over_what_is_missing() -> None:
    feed, rng = StoredFeed(), random.Random(0)
    ids = [event_id for event_id in range(100, 4000) if not 2000 <= event_id < 2010]
    shuffled = sorted(ids, key=lambda event_id: event_id + rng.random() * 100)
    handed = [ready.event_id for event_id in shuffled for ready in feed.offer(batch(event_id))]
    handed += [ready.event_id for ready in feed.end()]
    assert handed == ids
    assert feed.num_missing == 99 + 10


def test_a_stored_feed_waits_no_longer_than_it_must() -> None:
    feed = StoredFeed()
    list(feed.offer(batch(1)))
    waiting = [list(feed.offer(batch(event_id))) for event_id in range(3, REORDER_BATCHES + 10)]
    assert any(waiting)


async def test_nothing_is_sent_to_a_worker_that_is_known_by_its_events_alone() -> None:
    pool = WorkerPool("router-0", "tiny", 16, LoadLedger(16, 60.0))
    record = WorkerRecord(MAJOR, "w", 1, EVENTS_ROLE, "ready", "", None, "tiny", "", 16, 100, 1600, 1)
    pool.apply(Change("added", record))
    assert pool.decode_keys() == pool.prefill_keys() == ()
    pool.apply(Change("removed", record))
    await pool.close()
