"""A worker's block table, made from its stored events, for workers that cannot be asked for it (EVENTS_ROLE).

The events are applied to a tree of their own, so that the result is a snapshot like any other and healing works as for
every worker. The snapshot is exact when the stream still holds the worker's first batch or a batch that clears
everything. Therefore a worker that publishes for longer than the stream remembers must clear and repeat its table from
time to time (see baton/events/event_source.py).
"""

from collections.abc import AsyncIterator, Iterable

import msgspec
import structlog

from baton_proto.kv_events import KvEventBatch, decode_batch
from baton_proto.worker import SnapshotChunk
from router.index.radix_tree import RadixTree
from runtime.discovery.worker_key import WorkerKey
from runtime.errors import ProtocolError
from runtime.kv_events.stored_feed import StoredFeed
from runtime.nats.client import NatsClient
from runtime.nats.subjects import kv_events_stream, kv_events_subject

MESSAGES_PER_REQUEST = 1000
RUNS_PER_CHUNK = 1000

log = structlog.get_logger()


async def snapshot_from_stream(nats: NatsClient, worker: WorkerKey) -> AsyncIterator[SnapshotChunk]:
    """Chunks as workers send them. Raises NATS_ERRORS."""
    tree, feed = RadixTree(), StoredFeed()
    refused = 0
    async for batches in _batches(nats, worker, feed):
        for event in (event for batch in batches for event in batch.events):
            try:
                tree.apply(worker, event)
            except ProtocolError:
                refused += 1
    if refused:
        log.warning(
            "the stream does not hold all events of a worker; its blocks are known in part",
            worker=worker[0],
            missing=feed.num_missing,
            refused=refused,
        )
    runs = list(tree.dump(worker))
    for start in range(0, len(runs), RUNS_PER_CHUNK):
        yield SnapshotChunk(worker[1], feed.applied, runs[start : start + RUNS_PER_CHUNK], last=False)
    yield SnapshotChunk(worker[1], feed.applied, [], last=True)


async def _batches(nats: NatsClient, worker: WorkerKey, feed: StoredFeed) -> AsyncIterator[Iterable[KvEventBatch]]:
    """The worker's stored batches, in the order of their ids."""
    stream, subject = kv_events_stream(nats.namespace), kv_events_subject(nats.namespace, worker[0])
    position = 1
    while messages := await nats.stored_messages(stream, subject, position, MESSAGES_PER_REQUEST):
        for message in messages:
            try:
                batch = decode_batch(message.payload)
            except msgspec.DecodeError:
                continue
            if (batch.worker_id, batch.incarnation) == worker:
                yield feed.offer(batch)
        position = messages[-1].sequence + 1
    yield feed.end()
