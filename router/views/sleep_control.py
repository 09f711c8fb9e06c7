"""Puts workers to sleep and wakes them for an operator; the worker does the work.

Routing need not be told: a worker that is not `ready` gets no requests.
"""

from baton_proto.generated import inference_pb2 as pb
from baton_proto.worker import SleepReport
from router.workers.link import WorkerLink
from router.workers.pool import WorkerPool
from runtime.errors import InvalidRequestError, UnavailableError

DEFAULT_TIMEOUT_S = 30.0


class SleepControl:
    """Both methods raise InvalidRequestError when there is no such worker, WorkerLostError when it does not answer, and
    UnavailableError with the worker's reason when it refuses."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    async def sleep(self, request: pb.SleepRequest) -> pb.SleepResponse:
        link = self._link(request.worker_id)
        return _response(
            request.worker_id, await link.sleep(request.level or 1, request.timeout_s or DEFAULT_TIMEOUT_S)
        )

    async def wake(self, request: pb.WakeRequest) -> pb.SleepResponse:
        return _response(request.worker_id, await self._link(request.worker_id).wake(list(request.tags)))

    def _link(self, worker_id: str) -> WorkerLink:
        worker = self._pool.workers.get(worker_id)
        if worker is None:
            known = ", ".join(sorted(self._pool.workers)) or "none"
            raise InvalidRequestError("worker_id", f"there is no worker {worker_id!r}; known are {known}")
        return worker.link


def _response(worker_id: str, report: SleepReport) -> pb.SleepResponse:
    if report.problem:
        raise UnavailableError(f"{worker_id} {report.problem}")
    return pb.SleepResponse(
        worker_id=worker_id,
        state=report.state,
        asleep=report.asleep,
        freed_bytes=report.freed_bytes,
        seconds=report.seconds,
    )
