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
    pool: WorkerPool, assigner: Assigner, facts: Request, max_tokens: int, hashes: NDArray[np.uint64]
) -> Request:
    """Leaves out the workers of all forms but the one that costs least."""
    options = [replace(facts, excluded=facts.excluded | others) for others in pool.strangers()]
    return min(options, key=lambda one: _total_ms(assigner.weigh(one, max_tokens, hashes)), default=facts)


def _total_ms(weighing: Weighing) -> float:
    """Infinite: the request would have to wait."""
    placement = weighing.placement()
    if placement is None:
        return math.inf
    return next(cost.total for cost in weighing.decode.costs() if cost.worker == placement.decode)
