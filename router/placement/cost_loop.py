"""The arithmetic of a placement as compiled loops over columns: what each candidate costs, and which one is chosen.

Called by router/placement/placement.py alone, whose docstring says what the terms mean.
"""

import math

import numba
import numpy as np
from numpy.typing import NDArray

from runtime.compiled import compiled, inlined

# Where the prompt of a candidate would run and why; RUNS_PROMPT and above: on the candidate itself.
LONG, BUSY, SHORT, FULL, ALONE = 0, 1, 2, 3, 4
RUNS_PROMPT = SHORT

# Why a candidate cannot be chosen.
FREE, EXCLUDED, QUEUE_FULL, NO_ROOM, NOBODY_SHIPS = 0, 1, 2, 3, 4

_INT, _FLOAT = numba.int64, numba.float64


@inlined
def _choose(barred: NDArray[np.int8], totals: NDArray[np.float64], temperature: float, draw: float) -> int:
    lowest, highest = math.inf, -math.inf
    for i in range(len(totals)):
        if barred[i] == FREE:
            lowest, highest = min(lowest, totals[i]), max(highest, totals[i])
    weights = np.zeros(len(totals))
    for i in range(len(totals)):
        if barred[i] == FREE:
            if totals[i] == lowest:
                weights[i] = 1.0
            elif temperature > 0.0:
                weights[i] = math.exp((lowest - totals[i]) / ((highest - lowest) * temperature))
    left = draw * weights.sum()
    chosen = -1
    for i in range(len(totals)):
        if weights[i] > 0.0:
            chosen = i
            left -= weights[i]
            if left < 0.0:
                break
    return chosen


@compiled(
    *(numba.int32[::1], numba.int64[:, ::1], numba.float64[::1], numba.boolean[::1]),
    *(_INT, _INT, numba.boolean, numba.boolean),
    *(_INT, _INT, _INT, _INT, numba.boolean),
    *(_FLOAT, _FLOAT, _FLOAT, _FLOAT, _FLOAT),
    *(_FLOAT, _FLOAT, _FLOAT),
    *(numba.int8[::1], numba.int8[::1], _FLOAT[::1]),
    returns=_INT,
)
def choose(
    cached: NDArray[np.int32],
    load: NDArray[np.int64],  # [n, 4]: requests, queued prefill tokens, active blocks, queued prefill pairs
    stored: NDArray[np.float64],  # [n] blocks
    excluded: NDArray[np.bool_],
    num_tokens: int,
    block_size: int,
    alone: bool,
    can_ship: bool,
    max_requests: int,
    max_queued_tokens: int,
    local_tokens: int,
    local_requests: int,
    local_when_full: bool,
    overlap_weight: float,
    prefill_weight: float,
    transfer_weight: float,
    load_weight: float,
    eviction_weight: float,
    pair_cost: float,
    temperature: float,
    draw: float,
    reasons: NDArray[np.int8],
    barred: NDArray[np.int8],
    totals: NDArray[np.float64],
) -> int:
    """Index of the cheapest that is free, ties by `draw` from [0, 1); above temperature 0 by softmax over
    -(total - lowest) / (highest - lowest). -1: none is free. `pair_cost`: of a pair of tokens in attention, in blocks.
    Fills `reasons`, `barred` and `totals`, one of each per candidate."""
    prompt_blocks = -(-num_tokens // block_size)
    prompt = prompt_blocks + pair_cost * num_tokens * num_tokens / 2
    for i in range(len(cached)):
        requests, queued, active = load[i, 0], load[i, 1], load[i, 2]
        cached_blocks = min(cached[i], (num_tokens - 1) // block_size)  # the last token is computed, for its logits
        cached_tokens = cached_blocks * block_size
        uncached = num_tokens - cached_tokens
        if alone:
            reasons[i] = ALONE
        elif uncached + queued <= local_tokens and requests < local_requests:
            reasons[i] = SHORT
        elif local_when_full and not can_ship and queued == 0 and requests < local_requests:
            reasons[i] = FULL
        elif uncached <= local_tokens:
            reasons[i] = BUSY
        else:
            reasons[i] = LONG
        if reasons[i] >= RUNS_PROMPT:
            saved = cached_blocks + pair_cost * cached_tokens * cached_tokens / 2
            prefill = prompt + queued / block_size + pair_cost * load[i, 3] - overlap_weight * saved
            shipped, lost = 0, stored[i]
        else:
            prefill = prompt
            shipped, lost = prompt_blocks - cached_blocks, 0.0
        totals[i] = prefill_weight * prefill + transfer_weight * shipped + load_weight * active + eviction_weight * lost
        if excluded[i]:
            barred[i] = EXCLUDED
        elif queued >= max_queued_tokens:
            barred[i] = QUEUE_FULL
        elif requests >= max_requests:
            barred[i] = NO_ROOM
        elif not can_ship and reasons[i] < RUNS_PROMPT:
            barred[i] = NOBODY_SHIPS
        else:
            barred[i] = FREE
    return _choose(barred, totals, temperature, draw)
