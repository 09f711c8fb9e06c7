"""Workers with different forms of KV in one service, such as two versions of an engine: a request goes to those of one
form, because a prompt's KV is no use to the others. Pure."""

import math
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from router.placement.candidates import Request
from router.placement.placement import Weighing
from runtime.discovery.worker_key import WorkerKey


def of_each_form(request: Request, strangers: Sequence[frozenset[WorkerKey]]) -> list[Request]:
    """The request as the workers of each form see it: those of the others are left out. `strangers`: see WorkerPool."""
    return [replace(request, excluded=request.excluded | others) for others in strangers] or [request]


def best_form(weighings: Iterable[Weighing], due_ms: float) -> Weighing:
    """The one that costs least of those that are in time, else the soonest."""
    return min(weighings, key=lambda weighing: _rank(weighing, due_ms))


def _rank(weighing: Weighing, due_ms: float) -> tuple[float, float]:
    """How late, and what it costs. The first is infinite where the request would have to wait, and then the second says
    until when at least."""
    placement = weighing.placement()
    if placement is None:
        return math.inf, (weighing.prefill if len(weighing.prefill) else weighing.decode).soonest_ms()
    total = next(cost.total for cost in weighing.costs() if cost.worker == placement.decode)
    return (placement.ttft_ms if placement.ttft_ms > due_ms else 0.0), total
