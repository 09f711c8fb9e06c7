"""Asks workers to sleep and to wake, for an operator. A worker that is not `ready` gets no requests."""

from collections.abc import Iterable
from typing import Self

from baton_proto.generated import inference_pb2 as pb
from baton_proto.worker import SleepReport
from router.workers.pool import WorkerPool
from runtime.calls.worker import WorkerClient
from runtime.errors import InvalidRequestError

DEFAULT_TIMEOUT_S = 30.0


class SleepControl:
    """Its questions raise InvalidRequestError when the worker is unknown, WorkerLostError when it does not answer, and
    UnavailableError with its reason when it refuses."""

    def __init__(self, *pools: WorkerPool) -> None:
        """`pools`: one per model."""
        self._pools = pools

    @classmethod
    def over(cls, controls: Iterable[Self]) -> Self:
        """One for the workers of all models."""
        return cls(*(pool for control in controls for pool in control._pools))

    async def sleep(self, request: pb.SleepRequest) -> pb.SleepResponse:
        level, timeout_s = request.level or 1, request.timeout_s or DEFAULT_TIMEOUT_S
        return _response(request.worker_id, await self._client(request.worker_id).sleep(level, timeout_s))

    async def wake(self, request: pb.WakeRequest) -> pb.SleepResponse:
        return _response(request.worker_id, await self._client(request.worker_id).wake(list(request.tags)))

    async def state(self, worker_id: str) -> str:
        """The state that the worker itself tells: its record may be a moment older."""
        return (await self._client(worker_id).inspect()).state

    def known(self) -> list[str]:
        return sorted(name for pool in self._pools for name in pool.workers)

    def _client(self, worker_id: str) -> WorkerClient:
        having = [pool for pool in self._pools if worker_id in pool.workers]
        if len(having) == 1 or len(self._pools) == 1:
            return (having or self._pools)[0].client(worker_id)
        known = ", ".join(self.known()) or "none"
        problem = "workers of several models have the name" if having else "there is no worker"
        raise InvalidRequestError("worker_id", f"{problem} {worker_id!r}; known are {known}")


def _response(worker_id: str, report: SleepReport) -> pb.SleepResponse:
    return pb.SleepResponse(
        worker_id=worker_id,
        state=report.state,
        asleep=report.asleep,
        freed_bytes=report.freed_bytes,
        seconds=report.seconds,
    )
