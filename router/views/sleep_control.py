"""Asks workers to sleep and to wake, for an operator. A worker that is not `ready` gets no requests."""

from baton_proto.generated import inference_pb2 as pb
from baton_proto.worker import SleepReport
from router.workers.pool import WorkerPool

DEFAULT_TIMEOUT_S = 30.0


class SleepControl:
    """Its questions raise InvalidRequestError when the worker is unknown, WorkerLostError when it does not answer, and
    UnavailableError with its reason when it refuses."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    async def sleep(self, request: pb.SleepRequest) -> pb.SleepResponse:
        level, timeout_s = request.level or 1, request.timeout_s or DEFAULT_TIMEOUT_S
        return _response(request.worker_id, await self._pool.client(request.worker_id).sleep(level, timeout_s))

    async def wake(self, request: pb.WakeRequest) -> pb.SleepResponse:
        return _response(request.worker_id, await self._pool.client(request.worker_id).wake(list(request.tags)))

    async def state(self, worker_id: str) -> str:
        """The state that the worker itself tells: its record may be a moment older."""
        return (await self._pool.client(worker_id).inspect()).state

    def known(self) -> list[str]:
        return sorted(self._pool.workers)


def _response(worker_id: str, report: SleepReport) -> pb.SleepResponse:
    return pb.SleepResponse(
        worker_id=worker_id,
        state=report.state,
        asleep=report.asleep,
        freed_bytes=report.freed_bytes,
        seconds=report.seconds,
    )
