"""Unary calls to a worker by those who have no link to it, which are all but the routers."""

from typing import Any, TypeVar

import grpc
from msgspec import Struct

from baton_proto.worker import (
    DRAIN,
    MAJOR,
    SLEEP,
    WAKE,
    DrainReport,
    DrainRequest,
    SleepReport,
    SleepRequest,
    WakeRequest,
    decoder,
    encode,
)
from runtime.errors import UnavailableError, WorkerLostError
from runtime.security.cluster_key import WORKER_CALLS, ClusterKey
from runtime.security.grpc_bearer import Metadata, metadata

CALL_GRACE_S = 5.0  # beyond the time that the worker keeps itself
MEMORY_TIMEOUT_S = 60.0  # to copy or read the weights

Report = TypeVar("Report", bound=Struct)


def call_metadata(key: ClusterKey | None) -> Metadata:
    """What a worker's gRPC server asks for."""
    return metadata(None if key is None else key.derive(WORKER_CALLS))


async def drain_worker(worker_id: str, rpc_address: str, timeout_s: float, key: ClusterKey | None) -> int:
    """Has it take no new request. Returns how many are in flight when all have ended or the time is up. Raises
    WorkerLostError."""
    request = DrainRequest(MAJOR, timeout_s)
    limit_s = timeout_s + CALL_GRACE_S
    return (await _call(worker_id, rpc_address, DRAIN, request, DrainReport, limit_s, key)).remaining


async def sleep_worker(worker_id: str, rpc_address: str, level: int, timeout_s: float, key: ClusterKey | None) -> None:
    """`timeout_s`: for requests in flight, and again for peers. Raises WorkerLostError, and UnavailableError when it
    stays awake."""
    request = SleepRequest(MAJOR, level, timeout_s)
    limit_s = 2 * timeout_s + MEMORY_TIMEOUT_S
    _done(await _call(worker_id, rpc_address, SLEEP, request, SleepReport, limit_s, key))


async def wake_worker(worker_id: str, rpc_address: str, key: ClusterKey | None) -> None:
    """All of it. Raises WorkerLostError, and UnavailableError when it sleeps on."""
    _done(await _call(worker_id, rpc_address, WAKE, WakeRequest(MAJOR, []), SleepReport, MEMORY_TIMEOUT_S, key))


def _done(report: SleepReport) -> None:
    if report.problem:
        raise UnavailableError(report.problem)


async def _call(
    worker_id: str,
    rpc_address: str,
    method: str,
    request: Struct,
    answer: type[Report],
    timeout_s: float,
    key: ClusterKey | None,
) -> Report:
    async with grpc.aio.insecure_channel(rpc_address) as channel:
        call: Any = channel.unary_unary(method, encode, decoder(answer))
        try:
            report = await call(request, timeout=timeout_s, metadata=call_metadata(key))
        except grpc.aio.AioRpcError as error:
            raise WorkerLostError(worker_id, f"{error.code().name}: {error.details()}") from error
    if not isinstance(report, answer):
        raise WorkerLostError(worker_id, "sent an answer that cannot be decoded")
    return report
