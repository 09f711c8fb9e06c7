"""A worker's event batches in JetStream: numbered, in order, through outages."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from baton.service.local.nats_server import NatsServer
from baton_proto.kv_events import HOST, Cleared, KvEvent, KvEventBatch, Moved, Removed, Stored, decode_batch
from runtime.kv_events.publisher import BATCH_HASH_BYTES, EventPublisher, split_events
from runtime.nats.client import NatsClient, connect
from runtime.nats.subjects import kv_events_stream, kv_events_subject

WORKER = "prefill-0"
SUBJECT = kv_events_subject("default", WORKER)
HASHES = np.arange(BATCH_HASH_BYTES // 8, dtype="<u8").tobytes()


@pytest.fixture
async def publisher(nats: NatsClient) -> AsyncIterator[EventPublisher]:
    publisher = EventPublisher(nats, WORKER, incarnation=3)
    yield publisher
    await publisher.close()


def removed(*hashes: int) -> Removed:
    return Removed(np.array(hashes, dtype="<u8").tobytes())


async def stored_batches(nats: NatsClient) -> list[KvEventBatch]:
    batches, sequence = [], 1
    while (message := await nats.stored_message(kv_events_stream("default"), SUBJECT, sequence)) is not None:
        assert message.data is not None
        assert message.seq is not None
        batches.append(decode_batch(message.data))
        sequence = message.seq + 1
    return batches


def in_order_without_holes(batches: list[KvEventBatch], up_to: int, first: int = 1) -> bool:
    """As a router reads them: repeated batches are skipped, a hole would show."""
    expected = first
    for batch in batches:
        if batch.event_id == expected:
            expected += 1
    return expected == up_to + 1


async def test_batches_are_numbered_from_one_in_the_order_of_publishing(
    nats: NatsClient, publisher: EventPublisher
) -> None:
    assert publisher.last_event_id == 0
    for number in range(1, 1001):
        publisher.publish([removed(number)])
    assert publisher.last_event_id == 1000
    assert await publisher.flush(10)
    batches = await stored_batches(nats)
    assert [batch.event_id for batch in batches] == list(range(1, 1001))
    assert [batch.events for batch in batches] == [[removed(number)] for number in range(1, 1001)]
    assert {(batch.worker_id, batch.incarnation) for batch in batches} == {(WORKER, 3)}


async def test_plain_subscribers_see_batches_at_once(nats: NatsClient, publisher: EventPublisher) -> None:
    arrived: asyncio.Queue[bytes] = asyncio.Queue()
    await nats.subscribe(kv_events_subject("default"), lambda subject, payload, headers: arrived.put_nowait(payload))
    publisher.publish([Cleared()])
    assert decode_batch(await asyncio.wait_for(arrived.get(), 30)).events == [Cleared()]


@pytest.mark.parametrize("lose_storage", [False, True])
async def test_what_was_published_during_an_outage_arrives_after_it(
    nats_server: NatsServer, nats: NatsClient, publisher: EventPublisher, lose_storage: bool
) -> None:
    publisher.publish([removed(1)])
    assert await publisher.flush(5)
    await nats_server.kill()
    for number in range(2, 102):
        publisher.publish([removed(number)])
    assert publisher.unacknowledged == 100
    await nats_server.restart(lose_storage)
    publisher.publish([removed(102)])
    assert await publisher.flush(10)
    batches = await stored_batches(nats)
    assert batches[0].event_id == (2 if lose_storage else 1)
    assert in_order_without_holes(batches, 102, first=batches[0].event_id)


async def test_a_full_buffer_drops_the_oldest_batches(nats_server: NatsServer, nats: NatsClient) -> None:
    away = asyncio.Event()
    nats.on_disconnect(away.set)
    publisher = EventPublisher(nats, WORKER, incarnation=1, buffer_bytes=10_000)
    await nats_server.kill()
    await asyncio.wait_for(away.wait(), 30)
    for number in range(1, 1001):
        publisher.publish([removed(number)])
    assert 0 < publisher.unacknowledged < 1000
    assert publisher.dropped_batches == 1000 - publisher.unacknowledged
    await nats_server.start()
    assert await publisher.flush(10)
    ids = [batch.event_id for batch in await stored_batches(nats)]
    assert ids[0] == publisher.dropped_batches + 1
    assert ids[-1] == publisher.last_event_id == 1000
    await publisher.close()


async def test_a_batch_too_large_for_one_message_becomes_several_with_consecutive_ids(
    nats: NatsClient, publisher: EventPublisher
) -> None:
    hashes = np.arange(1, 100_001, dtype="<u8")
    publisher.publish([Stored(None, hashes.tobytes(), (hashes + np.uint64(10**9)).tobytes()), removed(5), Cleared()])
    assert await publisher.flush(10)
    batches = await stored_batches(nats)
    assert [batch.event_id for batch in batches] == list(range(1, publisher.last_event_id + 1))
    assert len(batches) >= 4
    events = [event for batch in batches for event in batch.events]
    assert events[-2:] == [removed(5), Cleared()]
    runs = [event for event in events if isinstance(event, Stored)]
    assert b"".join(run.block_hashes for run in runs) == hashes.tobytes()
    assert b"".join(run.sequence_hashes for run in runs) == (hashes + np.uint64(10**9)).tobytes()
    assert runs[0].parent is None
    for before, after in itertools.pairwise(runs):
        assert after.parent == int.from_bytes(before.sequence_hashes[-8:], "little")


class SmallNats(NatsServer):
    """`storage_bytes` on its disk."""

    storage_bytes = 100 << 20

    def _write_config(self) -> Path:
        path = super()._write_config()
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"jetstream": {"max_file_store": self.storage_bytes}})
        )
        return path


async def test_a_server_with_a_small_disk_gets_the_events_of_all_workers() -> None:
    server = SmallNats()
    await server.start()
    clients = [await connect(server.url, name, timeout_s=60) for name in ("prefill-0", "decode-0", "decode-1")]
    publishers = [EventPublisher(client, client.name, incarnation=3) for client in clients]
    for publisher in publishers:
        publisher.publish([Cleared()])
    assert all([await publisher.flush(20) for publisher in publishers])
    for publisher, client in zip(publishers, clients, strict=True):
        await publisher.close()
        await client.close()
    await server.stop()


async def test_a_server_without_storage_is_complained_of_seldom_and_with_the_way_out() -> None:
    server = SmallNats()
    server.storage_bytes = 1 << 20
    await server.start()
    client = await connect(server.url, WORKER, timeout_s=60)
    with capture_logs() as logs:
        publisher = EventPublisher(client, WORKER, incarnation=3)
        publisher.publish([Cleared()])
        async with asyncio.timeout(30):
            while publisher._failures < 5:
                await asyncio.sleep(0.05)
    await publisher.close()
    await client.close()
    await server.stop()
    told = [row["error"] for row in logs if row["event"].startswith("events not published")]
    assert len(told) == 3
    assert "nats.store_dir" in told[0]


def test_small_events_share_a_batch() -> None:
    assert list(split_events([Cleared(), removed(1), removed(2)])) == [[Cleared(), removed(1), removed(2)]]
    assert list(split_events([])) == []


@pytest.mark.parametrize(
    "event",
    [Removed(HASHES), Moved(HASHES, HOST), Stored(None, HASHES, HASHES, HOST)],
    ids=lambda event: type(event).__name__,
)
def test_events_of_many_blocks_are_split(event: Stored | Removed | Moved) -> None:
    parts = list(split_events([event]))
    assert len(parts) == 2
    told: list[KvEvent] = [piece for part in parts for piece in part]
    assert b"".join(getattr(piece, "sequence_hashes", b"") for piece in told) == HASHES
    assert {getattr(piece, "home", None) for piece in told} == {getattr(event, "home", None)}


async def test_events_of_quick_steps_leave_as_one_batch_and_none_waits_for_long(nats: NatsClient) -> None:
    publisher = EventPublisher(nats, WORKER, incarnation=3, gather_s=0.05)
    began_s = asyncio.get_running_loop().time()
    publisher.publish([removed(1)])
    assert publisher.last_event_id == 1, "the first one has nobody to wait for"
    publisher.publish([removed(2)])
    publisher.publish([removed(3), removed(4)])
    assert publisher.last_event_id == 1
    while publisher.last_event_id < 2:
        await asyncio.sleep(0.005)
    assert 0.05 <= asyncio.get_running_loop().time() - began_s < 20.0
    publisher.publish([removed(5)])
    publisher.pack()
    assert publisher.last_event_id == 3, "who counts events does not wait"
    publisher.publish([removed(6)])
    await publisher.close()
    batches = await stored_batches(nats)
    assert [batch.events for batch in batches] == [
        [removed(1)],
        [removed(2), removed(3), removed(4)],
        [removed(5)],
        [removed(6)],
    ]
