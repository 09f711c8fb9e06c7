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
    table = _Table(worker)
    stream, subject = kv_events_stream(nats.namespace), kv_events_subject(nats.namespace, worker[0])
    position = 1
    while messages := await nats.stored_messages(stream, subject, position, MESSAGES_PER_REQUEST):
        for message in messages:
            table.offer(message.payload)
        position = messages[-1].sequence + 1
    table.end()
    runs = list(table.tree.dump(worker))
    for start in range(0, len(runs), RUNS_PER_CHUNK):
        part = runs[start : start + RUNS_PER_CHUNK]
        yield SnapshotChunk(worker[1], table.event_id, part, last=False)
    yield SnapshotChunk(worker[1], table.event_id, [], last=True)


class _Table:
    def __init__(self, worker: WorkerKey) -> None:
        self.tree = RadixTree()
        self._worker = worker
        self._feed = StoredFeed()
        self._refused = 0

    @property
    def event_id(self) -> int:
        return self._feed.applied

    def offer(self, payload: bytes) -> None:
        try:
            batch = decode_batch(payload)
        except (msgspec.DecodeError, ProtocolError):
            return
        if (batch.worker_id, batch.incarnation) == self._worker:
            self._apply(self._feed.offer(batch))

    def end(self) -> None:
        self._apply(self._feed.end())
        if self._refused:
            log.warning(
                "the stream does not hold all events of a worker; its blocks are known in part",
                worker=self._worker[0],
                missing=self._feed.num_missing,
                refused=self._refused,
            )

    def _apply(self, batches: Iterable[KvEventBatch]) -> None:
        for batch in batches:
            for event in batch.events:
                try:
                    self.tree.apply(self._worker, event)
                except ProtocolError:
                    self._refused += 1
