"""Event batches that a router missed, from the JetStream stream that keeps an hour of them.

Batches are numbered per worker, messages per stream. A batch is found by bisection over the stream, which asks for the
worker's next message from a position on.
"""

import msgspec

from baton_proto.kv_events import KvEventBatch, decode_batch
from runtime.discovery.worker_key import WorkerKey
from runtime.nats.client import NatsClient
from runtime.nats.library import RawStreamMsg
from runtime.nats.subjects import kv_events_stream, kv_events_subject

MAX_BATCHES = 256  # a longer hole is healed faster by a snapshot


async def last_batch(nats: NatsClient, worker_id: str) -> KvEventBatch | None:
    """The newest stored batch of a worker. Raises NATS_ERRORS."""
    stream, subject = kv_events_stream(nats.namespace), kv_events_subject(nats.namespace, worker_id)
    return _decode(await nats.stored_message(stream, subject))


async def fetch_batches(nats: NatsClient, worker: WorkerKey, ids: range) -> list[KvEventBatch] | None:
    """The batches with these ids, in order; None when some are not stored (any more). Raises NATS_ERRORS."""
    if len(ids) > MAX_BATCHES:
        return None
    worker_id, incarnation = worker
    stream, subject = kv_events_stream(nats.namespace), kv_events_subject(nats.namespace, worker_id)
    sequences = await nats.stored_sequences(stream)
    low, high = sequences.start, sequences.stop
    while low < high:
        middle = (low + high) // 2
        message = await nats.stored_message(stream, subject, middle)
        batch = _decode(message)
        if message is None or message.seq is None or message.seq >= high:
            high = middle
        elif batch is None or (batch.incarnation, batch.event_id) < (incarnation, ids.start):
            low = message.seq + 1
        else:
            high = middle
    found: dict[int, KvEventBatch] = {}
    # A publisher that lost its connection sends some batches twice, so there are more messages than batches.
    for _ in range(2 * MAX_BATCHES):
        message = await nats.stored_message(stream, subject, low)
        if message is None or message.seq is None:
            return None
        batch = _decode(message)
        if batch is not None and batch.incarnation == incarnation and batch.event_id in ids:
            found[batch.event_id] = batch
            if len(found) == len(ids):
                return [found[event_id] for event_id in ids]
        low = message.seq + 1
    return None


def _decode(message: RawStreamMsg | None) -> KvEventBatch | None:
    if message is None or message.data is None:
        return None
    try:
        return decode_batch(message.data)
    except msgspec.DecodeError:
        return None
