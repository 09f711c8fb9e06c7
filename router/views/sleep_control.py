"""Asks workers to sleep and to wake, for an operator. A worker that is not `ready` gets no requests."""

from baton_proto.generated import inference_pb2 as pb
from baton_proto.worker import SleepReport
from router.workers.pool import WorkerPool
from runtime.calls.worker import WorkerClient
from runtime.errors import InvalidRequestError

DEFAULT_TIMEOUT_S = 30.0


class SleepControl:
    """Its questions raise InvalidRequestError when the worker is unknown, WorkerLostError when it does not answer, and
    UnavailableError with its reason when it refuses."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    async def sleep(self, request: pb.SleepRequest) -> pb.SleepResponse:
        level, timeout_s = request.level or 1, request.timeout_s or DEFAULT_TIMEOUT_S
        return _response(request.worker_id, await self._client(request.worker_id).sleep(level, timeout_s))

    async def wake(self, request: pb.WakeRequest) -> pb.SleepResponse:
        return _response(request.worker_id, await self._client(request.worker_id).wake(list(request.tags)))

    async def state(self, worker_id: str) -> str:
        """As the worker itself has it: its record may be a moment older."""
        return (await self._client(worker_id).inspect()).state

    def known(self) -> list[str]:
        return sorted(self._pool.workers)

    def _client(self, worker_id: str) -> WorkerClient:
        worker = self._pool.workers.get(worker_id)
        if worker is None:
            known = ", ".join(self.known()) or "none"
            raise InvalidRequestError("worker_id", f"there is no worker {worker_id!r}; known are {known}")
        return worker.link.client


def _response(worker_id: str, report: SleepReport) -> pb.SleepResponse:
    return pb.SleepResponse(
        worker_id=worker_id,
        state=report.state,
        asleep=report.asleep,
        freed_bytes=report.freed_bytes,
        seconds=report.seconds,
    )
