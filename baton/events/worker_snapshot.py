"""A worker's block table for somebody who is no router: asked over gRPC, or read from the stream when it cannot be
asked."""

from collections.abc import AsyncIterator

import grpc

from baton_proto.discovery import EVENTS_ROLE, WorkerRecord
from baton_proto.worker import MAJOR, SNAPSHOT, SnapshotChunk, SnapshotRequest, decoder, encode
from router.index.event_snapshot import snapshot_from_stream
from runtime.calls.worker import call_metadata
from runtime.errors import WorkerLostError
from runtime.nats.client import NatsClient
from runtime.security.cluster_key import ClusterKey


async def worker_snapshot(
    nats: NatsClient, record: WorkerRecord, timeout_s: float, key: ClusterKey | None
) -> AsyncIterator[SnapshotChunk]:
    """Raises WorkerLostError or NATS_ERRORS."""
    if record.role == EVENTS_ROLE:
        async for chunk in snapshot_from_stream(nats, (record.worker_id, record.incarnation)):
            yield chunk
        return
    async with grpc.aio.insecure_channel(record.rpc_address) as channel:
        ask = channel.unary_stream(SNAPSHOT, request_serializer=encode, response_deserializer=decoder(SnapshotChunk))
        try:
            async for chunk in ask(SnapshotRequest(MAJOR), timeout=timeout_s, metadata=call_metadata(key)):
                if chunk.incarnation != record.incarnation:
                    raise WorkerLostError(record.worker_id, "has been replaced")
                yield chunk
        except grpc.aio.AioRpcError as error:
            why = error.details() or error.code().name
            raise WorkerLostError(record.worker_id, f"does not send a snapshot: {why}") from error
