"""Unary calls to a worker by those who have no link to it, which are all but the routers."""

import grpc

from baton.errors import WorkerLostError
from baton_proto.worker import DRAIN, MAJOR, DrainReport, DrainRequest, decoder, encode

CALL_GRACE_S = 5.0  # beyond the time that the worker keeps itself


async def drain_worker(worker_id: str, rpc_address: str, timeout_s: float) -> int:
    """Has it take no new request. Returns how many are in flight when all have ended or the time is up. Raises
    WorkerLostError."""
    async with grpc.aio.insecure_channel(rpc_address) as channel:
        call = channel.unary_unary(DRAIN, encode, decoder(DrainReport))
        try:
            report = await call(DrainRequest(MAJOR, timeout_s), timeout=timeout_s + CALL_GRACE_S)
        except grpc.aio.AioRpcError as error:
            raise WorkerLostError(worker_id, f"{error.code().name}: {error.details()}") from error
    if not isinstance(report, DrainReport):
        raise WorkerLostError(worker_id, "sent an answer that cannot be decoded")
    return report.remaining
