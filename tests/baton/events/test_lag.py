"""`baton events lag`: what was published, what is stored, what is missing."""

import time

from baton.events.lag import GONE, LagMonitor, WorkerLag
from baton_proto.discovery import MAJOR, LoadReport, WorkerLoad
from baton_proto.kv_events import MAJOR as EVENTS_MAJOR, KvEventBatch, encode_batch
from runtime.discovery.load_board import publish_load
from runtime.kv_events.publisher import stream_config
from runtime.nats.client import NatsClient
from runtime.nats.subjects import kv_events_subject
from tests.baton.events.cluster import Cleared, Workers


async def lags(nats: NatsClient, window_s: float = 60.0) -> dict[str, WorkerLag]:
    monitor = LagMonitor(nats, window_s)
    await monitor.start(timeout_s=60)
    await monitor.update()
    await monitor.close()
    return {worker.worker_id: worker for worker in monitor.report()}


async def store(nats: NatsClient, worker_id: str, *event_ids: int) -> None:
    """Stores batches of incarnation 1, as a publisher that lost some."""
    await nats.ensure_stream(stream_config("default"))
    for event_id in event_ids:
        batch = KvEventBatch(EVENTS_MAJOR, worker_id, 1, event_id, time.time() - 100, [Cleared()])
        await nats.publish_stored(kv_events_subject("default", worker_id), encode_batch(batch))


async def test_a_healthy_worker_is_not_behind(nats: NatsClient, workers: Workers) -> None:
    source = await workers.publish("w", *[[Cleared(), Cleared()]] * 30)
    (worker,) = (await lags(nats)).values()
    assert (worker.stored_id, worker.published_id, worker.behind, worker.missing) == (30, 30, 0, [])
    assert (worker.role, worker.state, worker.incarnation) == ("events", "ready", source.incarnation)
    assert worker.events_per_s == 1.0
    assert worker.blocks_cached == 0
    assert worker.age_s is not None
    assert worker.age_s < 10


async def test_a_worker_that_says_more_than_is_stored_is_behind(nats: NatsClient, workers: Workers) -> None:
    source = await workers.publish("w", [Cleared()])
    monitor = LagMonitor(nats, 60)
    await monitor.start(timeout_s=60)
    await publish_load(
        nats, LoadReport(version=MAJOR, worker_id="w", incarnation=source.incarnation, load=WorkerLoad(last_event_id=4))
    )
    await nats.flush()
    await monitor.update()
    (worker,) = monitor.report()
    await monitor.close()
    assert (worker.published_id, worker.stored_id, worker.behind) == (4, 1, 3)


async def test_holes_in_the_stored_ids_are_listed(nats: NatsClient, workers: Workers) -> None:
    await workers.publish("w", [Cleared()])
    await store(nats, "gone", 3, 4, 9, 7, 7, 12)
    worker = (await lags(nats))["gone"]
    assert worker.missing == [range(5, 7), range(8, 9), range(10, 12)]
    assert (worker.state, worker.published_id, worker.behind) == (GONE, None, None)
    assert worker.age_s is not None
    assert 100 <= worker.age_s < 120


async def test_a_worker_without_recent_events_is_known_by_its_last_one(nats: NatsClient, workers: Workers) -> None:
    await workers.publish("w", [Cleared()], [Cleared()])
    (worker,) = (await lags(nats, window_s=1e-6)).values()
    assert (worker.stored_id, worker.behind) == (2, 0)


async def test_events_of_an_earlier_incarnation_do_not_count(nats: NatsClient, workers: Workers) -> None:
    await store(nats, "w", 1, 2, 50)
    await workers.add("w")
    (worker,) = (await lags(nats)).values()
    assert (worker.stored_id, worker.missing, worker.age_s) == (0, [], None)
    await workers.publish("w", [Cleared()])
    (worker,) = (await lags(nats)).values()
    assert (worker.stored_id, worker.missing) == (1, [])


async def test_an_empty_cluster_has_no_workers(nats: NatsClient) -> None:
    assert await lags(nats) == {}
