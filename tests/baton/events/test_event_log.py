"""The event stream as a log: everything once, in order, through outages."""

import asyncio
from datetime import UTC, datetime

import pytest
from structlog.testing import capture_logs

from baton.events.event_log import BATCHES_PER_READ, EventLog
from baton.service.local.nats_server import NatsServer
from baton_proto.kv_events import decode_batch
from runtime.errors import UnavailableError
from runtime.nats.client import NatsClient, connect
from runtime.nats.subjects import ANY, kv_events_stream, kv_events_subject
from tests.baton.events.cluster import Cleared, Workers


async def ids(log: EventLog) -> list[tuple[str, int]]:
    found = []
    while batches := await log.read():
        found += [(stored.batch.worker_id, stored.batch.event_id) for stored in batches]
    return found


async def test_all_that_is_stored_is_read_once_and_in_order(nats: NatsClient, workers: Workers) -> None:
    count = BATCHES_PER_READ + 17
    await workers.publish("w0", *[[Cleared()]] * count)
    await workers.publish("w1", [Cleared()])
    log = EventLog(nats)
    await log.seek(1)
    stream, subject = kv_events_stream("default"), kv_events_subject("default", ANY)
    stored = await nats.stored_messages(stream, subject, 1, 4 * BATCHES_PER_READ)
    batches = [decode_batch(message.payload) for message in stored]
    found = await ids(log)
    assert found == [(batch.worker_id, batch.event_id) for batch in batches]
    # A publisher sends again what is not acknowledged in time.
    assert list(dict.fromkeys(found)) == [("w0", n) for n in range(1, count + 1)] + [("w1", 1)]
    await workers.publish("w1", [Cleared()])
    assert await ids(log) == [("w1", 2)]


async def test_a_log_may_begin_now_or_at_a_time_and_follow_one_worker(nats: NatsClient, workers: Workers) -> None:
    await workers.publish("w0", [Cleared()])
    between = datetime.now(UTC)
    await workers.publish("w0", [Cleared()])
    await workers.publish("w1", [Cleared()])
    logs = [EventLog(nats), EventLog(nats), EventLog(nats, "w1")]
    for log, start in zip(logs, (None, between, 1), strict=True):
        await log.seek(start)
    await workers.publish("w0", [Cleared()])
    assert [await ids(log) for log in logs] == [[("w0", 3)], [("w0", 2), ("w1", 1), ("w0", 3)], [("w1", 1)]]


async def test_a_log_waits_for_the_first_worker_to_publish(nats: NatsClient, workers: Workers) -> None:
    log = EventLog(nats)
    await log.seek(None)
    assert await log.read() == []
    await workers.publish("w", [Cleared()])
    assert await ids(log) == [("w", 1)]


async def test_a_malformed_batch_is_logged_and_skipped(nats: NatsClient, workers: Workers) -> None:
    await workers.publish("w", [Cleared()])
    await nats.publish_stored(kv_events_subject("default", "evil"), b"\xc1nonsense")
    await workers.publish("w", [Cleared()])
    log = EventLog(nats)
    await log.seek(1)
    with capture_logs() as lines:
        assert await ids(log) == [("w", 1), ("w", 2)]
    assert [line["event"] for line in lines] == ["malformed kv event skipped"]


@pytest.mark.parametrize("lose_storage", [False, True])
async def test_following_goes_on_after_an_outage(nats_server: NatsServer, workers: Workers, lose_storage: bool) -> None:
    reader = await connect(nats_server.url, "reader", timeout_s=60)
    log = EventLog(reader)
    await workers.publish("w", *[[Cleared()]] * 5)
    await log.seek(1)
    seen: list[int] = []

    async def follow() -> None:
        async for batches in log.follow(timeout_s=60):
            seen.extend(stored.batch.event_id for stored in batches)

    following = asyncio.create_task(follow())
    try:
        async with asyncio.timeout(60):
            while seen != [1, 2, 3, 4, 5]:
                await asyncio.sleep(0.005)
            await nats_server.restart(lose_storage)
            await workers.publish("w", [Cleared()])
            while seen != [1, 2, 3, 4, 5, 6]:
                await asyncio.sleep(0.005)
    finally:
        following.cancel()
        await asyncio.wait([following])
        await reader.close()


async def test_following_ends_with_an_error_when_nats_stays_away(nats_server: NatsServer, nats: NatsClient) -> None:
    log = EventLog(nats)
    await log.seek(1)
    await nats_server.kill()
    with pytest.raises(UnavailableError, match=r"has not answered for 0\.5 s"):
        await asyncio.wait_for(follow_for_ever(log), 60)


async def follow_for_ever(log: EventLog) -> None:
    async for _ in log.follow(timeout_s=0.5):
        pass
