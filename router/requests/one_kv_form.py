"""Workers with different forms of KV in one service, such as two versions of vLLM: a request goes to those of one form,
because a prompt's KV is no use to the others."""

import math

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from router.placement.assignment import Assigner
from router.placement.candidates import Request
from router.placement.placement import Weighing
from router.workers.pool import WorkerPool


def of_one_form(
    pool: WorkerPool,
    assigner: Assigner,
    facts: Request,
    max_tokens: int,
    hashes: NDArray[np.uint64],
    due_ms: float = math.inf,
) -> Request:
    """Leaves out the workers of all forms but one: the one that costs least of those that are in time, else the
    soonest."""

    def rank(one: Request) -> tuple[float, float]:
        return _rank(assigner.weigh(one, max_tokens, hashes, due_ms), due_ms)

    options = [replace(facts, excluded=facts.excluded | others) for others in pool.strangers()]
    return min(options, key=rank, default=facts)


def _rank(weighing: Weighing, due_ms: float) -> tuple[float, float]:
    """How late, and what it costs. Infinite: the request would have to wait."""
    placement = weighing.placement()
    if placement is None:
        return math.inf, math.inf
    ttft_ms = weighing.decode.ttft_ms(weighing.decode.chosen)
    total = next(cost.total for cost in weighing.decode.costs() if cost.worker == placement.decode)
    return (ttft_ms if ttft_ms > due_ms else 0.0), total
