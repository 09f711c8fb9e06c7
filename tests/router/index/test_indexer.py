"""The radix tree follows the workers' caches over a real NATS server, whatever goes wrong on the way."""

import asyncio
import contextlib
import random
import time

import pytest

import router.index.followed_worker
from baton_proto.discovery import WorkerLoad
from baton_proto.kv_events import MAJOR, Cleared, KvEventBatch, Stored, decode_batch, encode_batch
from router.index.followed_worker import SILENT_NOTE
from runtime.discovery.directory import Change
from runtime.discovery.worker_key import WorkerKey
from runtime.nats.client import NatsClient
from runtime.nats.subjects import kv_events_stream, kv_events_subject
from tests.router.indexed_cluster import Cluster, FakeWorker, blocks, raw, stored


async def test_the_tree_follows_what_workers_publish(cluster: Cluster) -> None:
    one, two = await cluster.add("one"), await cluster.add("two")
    one.publish(one.cache.store([1, 2, 3]))
    two.publish(two.cache.store([1, 2]), two.cache.store([1, 2, 4], known=2))
    await cluster.until_equal(one)
    await cluster.until_equal(two)
    assert cluster.indexer.match(blocks([1, 2, 3])) == {one.key: 3, two.key: 2}
    one.publish(one.cache.evict([1, 2, 3], kept=1))
    two.cache.tree.clear(two.key)
    two.publish(Cleared())
    await cluster.until_equal(one)
    await cluster.until_equal(two)
    assert cluster.indexer.match(blocks([1, 2, 3])) == {one.key: 1}
    assert cluster.indexer.last_event_id(one.key) == 2
    assert cluster.indexer.settled
    assert (one.snapshots, two.snapshots) == (1, 1), "only those at the start"


async def test_a_worker_that_was_there_before_the_router_is_known_by_its_snapshot(cluster: Cluster) -> None:
    worker = FakeWorker(cluster.worker_nats)
    cluster.workers["w"] = worker
    for number in range(20):
        worker.publish(worker.cache.store([number % 3 + 1, number]))
    assert await worker.publisher.flush(5)
    cluster.indexer.apply(Change("added", worker.record()))
    await cluster.until_equal(worker)
    assert cluster.indexer.last_event_id(worker.key) == 20


async def test_events_that_come_during_a_snapshot_are_applied_after_it(cluster: Cluster) -> None:
    worker = FakeWorker(cluster.worker_nats)
    cluster.workers["w"] = worker
    worker.publish(worker.cache.store([1, 2]))
    worker.publish(worker.cache.store([3, 4]))
    worker.pause = asyncio.Event()
    cluster.indexer.apply(Change("added", worker.record()))
    await cluster.until(lambda: worker.snapshots == 1)
    worker.publish(worker.cache.evict([1, 2], kept=1))
    worker.publish(worker.cache.store([5]))
    assert await worker.publisher.flush(5)
    assert cluster.indexer.note(worker.key) == "a snapshot is being taken"
    worker.pause.set()
    await cluster.until_equal(worker)
    assert cluster.indexer.last_event_id(worker.key) == 4
    assert worker.snapshots == 1


async def test_a_failing_snapshot_is_tried_again(cluster: Cluster) -> None:
    worker = FakeWorker(cluster.worker_nats)
    cluster.workers["w"] = worker
    worker.snapshots_fail = 2
    worker.publish(worker.cache.store([1, 2]))
    cluster.indexer.apply(Change("added", worker.record()))
    await cluster.until(lambda: "no snapshot: not reachable now" in cluster.indexer.note(worker.key))
    await cluster.until_equal(worker)
    await cluster.until(lambda: cluster.indexer.note(worker.key) == "")


async def test_duplicates_and_batches_out_of_order_do_no_harm(cluster: Cluster) -> None:
    worker = await cluster.add()
    events = [worker.cache.store([1]), worker.cache.store([1, 2], 1), worker.cache.store([1, 2, 3], 2)]
    for event_id in (1, 1, 3, 2, 3, 1):
        await raw(cluster, worker, event_id, events[event_id - 1], store=False)
    await cluster.until_equal(worker)
    await cluster.worker_nats.flush()
    await cluster.router_nats.flush()
    assert cluster.indexer.snapshots == 1
    assert cluster.indexer.refused_events == 0


async def test_malformed_events_are_counted_and_skipped(cluster: Cluster) -> None:
    good = await cluster.add("good")
    subject = kv_events_subject("default", "good")
    await cluster.worker_nats.publish(subject, b"\xc1 no msgpack")
    await cluster.worker_nats.publish(subject, encode_batch(KvEventBatch(MAJOR + 1, "good", 1, 1, 0.0, [])))
    await cluster.worker_nats.publish(subject, encode_batch(KvEventBatch(MAJOR, "other", 1, 1, 0.0, [])))
    good.publish(good.cache.store([1, 2]))
    await cluster.until_equal(good)
    assert cluster.indexer.malformed_events == 3
    assert good.snapshots == 1


async def test_events_that_contradict_the_tree_are_counted_and_healed_by_a_snapshot(cluster: Cluster) -> None:
    bad, good = await cluster.add("bad"), await cluster.add("good")
    lost = bad.cache.store([1, 2])  # never published
    assert isinstance(lost, Stored)
    bad.publish(bad.cache.store([1, 2, 3], known=2), bad.cache.store([7]))
    good.publish(good.cache.store([1]))
    await cluster.until_equal(good)
    await cluster.until(lambda: cluster.indexer.refused_events == 1)
    assert cluster.indexer.match(blocks([7])) == {bad.key: 1}, "the rest of the batch was applied"
    await cluster.until_equal(bad)
    assert (bad.snapshots, good.snapshots) == (2, 1)


async def test_a_gap_is_filled_from_jetstream(cluster: Cluster) -> None:
    worker, other = await cluster.add(), await cluster.add("other")
    worker.publish(worker.cache.store([1]))
    await cluster.until_equal(worker)
    # The router is deaf for a while, the stream is not.
    for sub in list(cluster.router_nats._client._subs.values()):
        if "kv_events" in sub.subject:
            await sub.unsubscribe()
    for number in range(2, 60):
        worker.publish(worker.cache.store([number]))
        other.publish(other.cache.store([number]))
    assert await worker.publisher.flush(5)
    assert await other.publisher.flush(5)
    await cluster.router_nats.subscribe(kv_events_subject("default"), cluster.indexer._receive)
    await cluster.router_nats.flush()
    worker.publish(worker.cache.store([99]))
    await cluster.until_equal(worker)
    assert worker.snapshots == 1
    assert cluster.indexer.gaps >= 1
    cluster.indexer._healer.reconnected()  # nothing new comes from the other one: what the stream has is looked up
    await cluster.until_equal(other)
    assert other.snapshots == 1


async def test_a_gap_that_jetstream_does_not_have_is_healed_by_a_snapshot(cluster: Cluster) -> None:
    worker = await cluster.add()
    worker.publish(worker.cache.store([1]))
    await cluster.until_equal(worker)
    worker.publisher._last_event_id += 5  # five batches that nobody ever sees
    worker.cache.store([1, 2])
    worker.publish(worker.cache.store([1, 2, 3], known=2))
    await cluster.until_equal(worker)
    assert worker.snapshots == 2
    assert cluster.indexer.last_event_id(worker.key) == 7
    assert cluster.indexer.refused_events == 0


async def test_a_new_incarnation_starts_from_nothing(cluster: Cluster) -> None:
    old = await cluster.add(incarnation=1)
    old.publish(old.cache.store([1, 2]))
    await cluster.until_equal(old)
    await cluster.remove(old)
    assert cluster.indexer.tree.num_blocks == 0
    new = await cluster.add(incarnation=2)
    new.publish(new.cache.store([3]))
    await cluster.until_equal(new)
    await raw(cluster, old, 3, stored([4]), store=False)  # a last word
    await cluster.router_nats.flush()
    assert cluster.indexer.match(blocks([1, 2])) == {}
    assert cluster.indexer.match(blocks([4])) == {}
    assert cluster.indexer.tree.workers == [new.key]


async def test_a_worker_that_leaves_in_mid_snapshot_is_forgotten(cluster: Cluster) -> None:
    worker = FakeWorker(cluster.worker_nats)
    cluster.workers["w"] = worker
    worker.pause = asyncio.Event()
    worker.publish(worker.cache.store([1]), worker.cache.store([2]))
    cluster.indexer.apply(Change("added", worker.record()))
    await cluster.until(lambda: worker.snapshots == 1)
    await cluster.remove(worker)
    assert cluster.indexer.tree.num_blocks == 0
    assert cluster.indexer.note(worker.key) == "not in the directory"
    worker.pause.set()
    assert cluster.indexer.settled


async def test_a_worker_that_leaves_while_a_gap_is_filled_is_forgotten(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when its leaving is not heard there: `asyncio.wait_for` swallows a cancellation at times."""
    worker = await cluster.add()
    asked = asyncio.Event()

    async def fetch(nats: NatsClient, key: WorkerKey, ids: range) -> list[KvEventBatch]:
        asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return [KvEventBatch(MAJOR, *key, event_id, time.time(), [stored([event_id])]) for event_id in ids]

    monkeypatch.setattr("router.index.healing.fetch_batches", fetch)
    await raw(cluster, worker, 2, stored([2]))
    await cluster.until(asked.is_set)
    healing = cluster.indexer.workers[0].healing
    assert healing is not None
    await cluster.remove(worker)
    await cluster.until(healing.done)
    assert cluster.indexer.tree.workers == []


@pytest.mark.parametrize("lose_storage", [False, True])
async def test_the_tree_is_right_again_soon_after_an_outage_of_nats(cluster: Cluster, lose_storage: bool) -> None:
    worker, idle = await cluster.add(), await cluster.add("idle")
    worker.publish(worker.cache.store([1, 2]))
    idle.publish(idle.cache.store([1]))
    await cluster.until_equal(worker)
    await cluster.until_equal(idle)
    await cluster.server.kill()
    for number in range(3, 40):
        worker.publish(worker.cache.store([1, 2, number], known=2))
    idle.publish(idle.cache.store([2, 2]))
    await cluster.server.restart(lose_storage)
    await cluster.until_equal(worker)
    cluster.report_load(idle)
    await cluster.until_equal(idle)
    await cluster.until(lambda: cluster.indexer.settled)


async def test_while_nats_is_away_a_busy_worker_is_followed_by_snapshots(cluster: Cluster) -> None:
    worker = await cluster.add()
    worker.publish(worker.cache.store([1]))
    await cluster.until_equal(worker)
    await cluster.server.kill()
    worker.publish(worker.cache.store([1, 2], known=1))
    cluster.report_load(worker)
    await cluster.until_equal(worker, timeout_s=60)
    assert worker.snapshots == 2
    await cluster.server.start()


async def test_a_worker_that_caches_blocks_but_publishes_nothing_is_named(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.index.followed_worker, "SILENT_S", 0.05)
    worker = await cluster.add()
    cluster.indexer.observe(worker.key, WorkerLoad(blocks_cached=3))
    assert cluster.indexer.note(worker.key) == ""
    await asyncio.sleep(0.1)
    cluster.indexer.observe(worker.key, WorkerLoad(blocks_cached=3))
    assert cluster.indexer.note(worker.key) == SILENT_NOTE
    cluster.indexer.observe(worker.key, WorkerLoad(blocks_cached=3, last_event_id=1))
    assert cluster.indexer.note(worker.key) != SILENT_NOTE


async def test_events_of_many_workers_are_kept_apart_in_the_stream(cluster: Cluster) -> None:
    """The range of one worker's batches is found among those of others."""
    from runtime.kv_events.history import fetch_batches

    workers = [await cluster.add(f"w{number}") for number in range(5)]
    rng = random.Random(0)
    for _ in range(400):
        worker = rng.choice(workers)
        worker.publish(Cleared())
    for worker in workers:
        assert await worker.publisher.flush(5)
    assert (await cluster.router_nats.stored_sequences(kv_events_stream("default"))) == range(1, 401)
    for worker in workers:
        last = worker.publisher.last_event_id
        for ids in (range(1, 2), range(1, last + 1), range(last // 2, last), range(last, last + 1)):
            batches = await fetch_batches(cluster.router_nats, worker.key, ids)
            assert batches is not None
            assert [(batch.worker_id, batch.event_id) for batch in batches] == [(worker.key[0], i) for i in ids]
        assert await fetch_batches(cluster.router_nats, worker.key, range(last, last + 2)) is None
    message = await cluster.router_nats.stored_message(kv_events_stream("default"), kv_events_subject("default", "w0"))
    assert message is not None
    assert message.data is not None
    assert decode_batch(message.data).event_id == workers[0].publisher.last_event_id
