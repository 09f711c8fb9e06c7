"""Updates the weights of workers, for an operator: every worker checks and drains before the first one changes."""

import asyncio
from collections.abc import Sequence

from baton_proto.generated import inference_pb2 as pb
from baton_proto.worker import UpdateReport
from router.workers.pool import WorkerPool
from runtime.errors import BatonError, InvalidRequestError, UnavailableError

DEFAULT_TIMEOUT_S = 30.0
ROLES = ("decode", "prefill")  # in the order in which they drain: decode workers' requests need prefill workers


class WeightsControl:
    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    async def update(self, request: pb.UpdateWeightsRequest) -> pb.UpdateWeightsResponse:
        """Raises InvalidRequestError for an unknown worker or no model, and UnavailableError, with nothing changed,
        when any worker does not take the checkpoint, does not drain or does not answer. Afterwards each worker has its
        own outcome."""
        if not request.model:
            raise InvalidRequestError("model", "names no folder of new weights")
        names = [request.worker_id] if request.worker_id else sorted(self._pool.workers)
        clients = {name: self._pool.client(name) for name in names}
        timeout_s = request.timeout_s or DEFAULT_TIMEOUT_S

        async def ask(step: str, workers: Sequence[str]) -> dict[str, UpdateReport | BatonError]:
            asked = (clients[name].update(step, request.model, timeout_s) for name in workers)
            reports = await asyncio.gather(*asked, return_exceptions=True)
            for report in reports:
                if isinstance(report, BaseException) and not isinstance(report, BatonError):
                    raise report
            return dict(zip(workers, reports, strict=True))  # type: ignore[arg-type]  # checked above

        roles = {name: self._pool.workers[name].record.role for name in names}
        loading = False
        try:
            _all_well(await ask("check", names))
            for role in ROLES:
                _all_well(await ask("hold", [name for name in names if roles[name] == role]))
            loading = True
            outcomes = await ask("load", names)
        finally:
            if not loading:
                await ask("release", names)
        return pb.UpdateWeightsResponse(workers=[_row(name, outcome) for name, outcome in outcomes.items()])


def _all_well(outcomes: dict[str, UpdateReport | BatonError]) -> None:
    """Raises UnavailableError with all reasons."""
    if problems := [str(outcome) for outcome in outcomes.values() if isinstance(outcome, BatonError)]:
        raise UnavailableError(f"no weights were changed: {'; '.join(problems)}")


def _row(worker_id: str, outcome: UpdateReport | BatonError) -> pb.WorkerWeights:
    if isinstance(outcome, BatonError):
        return pb.WorkerWeights(worker_id=worker_id, problem=str(outcome))
    return pb.WorkerWeights(
        worker_id=worker_id, state=outcome.state, model_hash=outcome.model_hash, seconds=outcome.seconds
    )
