"""Workers of several generations in one service: other weights, another form of KV, such as another version of an
engine, or another version of Baton. A request goes to the workers of one generation, because a prompt's KV is no use to
the others. Pure."""

import math
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from router.placement.candidates import Request
from router.placement.cost import KEPT, TOTAL
from router.placement.placement import Weighing
from router.workers.pool import Generation


def of_each_generation(request: Request, generations: Sequence[Generation]) -> list[Request]:
    """The request as the workers of each generation see it that may serve it: those of the others are left out. Only
    the weights that an answer was begun with may go on with it."""
    return [
        replace(request, excluded=request.excluded | others) if others else request
        for weights, others in generations
        if request.weights in (0, weights)
    ]


def best_generation(weighings: Iterable[Weighing], due_ms: float) -> Weighing:
    """The one that costs least of those that are in time, else the soonest."""
    return min(weighings, key=lambda weighing: _rank(weighing, due_ms))


def _rank(weighing: Weighing, due_ms: float) -> tuple[float, float]:
    """How late, and what it costs. The first is infinite where the request would have to wait, and then the second says
    until when at least."""
    weighed, chosen = weighing.best
    if chosen < 0:
        return math.inf, weighing.runners.soonest_ms()
    return weighed.rank(chosen, due_ms, KEPT if weighing.keeps else TOTAL)
