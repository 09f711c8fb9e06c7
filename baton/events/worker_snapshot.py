"""A worker's snapshot for a command: over gRPC, or from the event stream when the worker only publishes events."""

from collections.abc import AsyncIterator

from baton_proto.discovery import EVENTS_ROLE, WorkerRecord
from baton_proto.worker import SnapshotChunk
from router.index.event_snapshot import snapshot_from_stream
from runtime.calls.worker import WorkerClient
from runtime.nats.client import NatsClient
from runtime.security.cluster_key import ClusterKey


async def worker_snapshot(
    nats: NatsClient, record: WorkerRecord, timeout_s: float, key: ClusterKey | None
) -> AsyncIterator[SnapshotChunk]:
    """Yields the worker's blocks in chunks. Raises WorkerLostError or NATS_ERRORS."""
    if record.role == EVENTS_ROLE:
        async for chunk in snapshot_from_stream(nats, (record.worker_id, record.incarnation)):
            yield chunk
        return
    if key is not None and record.tls and key.tls is None:
        key = ClusterKey(key.secret, "auto")
    async with WorkerClient(record.worker_id, record.rpc_address, key, record.incarnation) as client:
        async for chunk in client.snapshot(timeout_s):
            yield chunk
