"""What a candidate costs, in KV blocks: one row per term, and the compiled loop that computes all candidates' terms.

A term is added in three places: its row in TERMS (and its number below), its formula in `choose`, its weight in
PlacementConfig. `baton events explain`, its gRPC message and the sum over the terms iterate over the rows.
"""

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from baton_proto.generated import inference_pb2 as pb
from runtime.compiled import compiled, inlined, together
from runtime.config.serving import PlacementConfig


class Term(NamedTuple):
    """One term. The last three fields are keys of PlacementConfig: the term's weight for a prefill worker, for a decode
    worker beside prefill workers, and for a worker that does both. An empty key: the term is 0 for such a worker."""

    name: str  # on the wire and in JSON
    heading: str  # of its column in `baton events explain`
    amount: str  # what the weight multiplies, in the formula below that table
    prefill: str
    decode: str
    mixed: str


TERMS: Final = (
    Term("prompt", "prompt", "prompt", "prefill_weight", "prefill_weight", "prefill_weight"),
    Term("cached", "- cached", "cached", "overlap_weight", "overlap_weight", "mixed_overlap_weight"),
    Term("queued", "+ queued", "queued", "prefill_weight", "prefill_weight", "prefill_weight"),
    Term("transfer", "+ shipped", "shipped", "", "transfer_weight", "transfer_weight"),
    Term("host", "+ from host", "restored from host", *["host_restore_weight"] * 3),
    Term("disk", "+ from disk", "restored from disk", *["disk_restore_weight"] * 3),
    Term("load", "+ load", "active", "", "load_weight", "mixed_load_weight"),
    Term("eviction", "+ stored", "stored lately", "", "", "eviction_weight"),
)
NUM_TERMS: Final = len(TERMS)
PROMPT, CACHED, QUEUED, TRANSFER, HOST, DISK, LOAD, EVICTION = range(NUM_TERMS)

Weights = tuple[float, ...]  # one per term
Limits = tuple[int, int, int, int, bool]  # see `choose`

# Where the prompt of a candidate would run and why. SHORT and above: on the candidate itself.
SHIPPED: Final = pb.PLACEMENT_REASON_SHIPPED
BUSY: Final = pb.PLACEMENT_REASON_DECODE_BUSY
SHORT: Final = pb.PLACEMENT_REASON_SHORT_PROMPT
FULL: Final = pb.PLACEMENT_REASON_PREFILL_FULL
ALONE: Final = pb.PLACEMENT_REASON_NO_PREFILL
RUNS_PROMPT: Final = SHORT

# Why a candidate cannot be chosen.
FREE: Final = pb.BARRED_REASON_UNSPECIFIED
EXCLUDED: Final = pb.BARRED_REASON_EXCLUDED
QUEUE_FULL: Final = pb.BARRED_REASON_QUEUE_FULL
NO_ROOM: Final = pb.BARRED_REASON_NO_ROOM
NOBODY_SHIPS: Final = pb.BARRED_REASON_PREFILL_FULL

_INT, _FLOAT, _BOOL = numba.int64, numba.float64, numba.boolean


class Rules:
    """A configuration with the weights of its terms for each kind of worker."""

    __slots__ = ("config", "decode", "mixed", "prefill")

    def __init__(self, config: PlacementConfig) -> None:
        def weights(keys: Iterable[str]) -> Weights:
            return tuple(getattr(config, key) if key else 0.0 for key in keys)

        self.config = config
        self.prefill = weights(term.prefill for term in TERMS)
        self.decode = weights(term.decode for term in TERMS)
        self.mixed = weights(term.mixed for term in TERMS)


@inlined
def _draw(barred: NDArray[np.int8], totals: NDArray[np.float64], temperature: float, draw: float) -> int:
    lowest, highest = math.inf, -math.inf
    for i in range(len(totals)):
        if barred[i] == FREE:
            lowest, highest = min(lowest, totals[i]), max(highest, totals[i])
    chances = np.zeros(len(totals))
    for i in range(len(totals)):
        if barred[i] == FREE:
            if totals[i] == lowest:
                chances[i] = 1.0
            elif temperature > 0.0:
                chances[i] = math.exp((lowest - totals[i]) / ((highest - lowest) * temperature))
    left = draw * chances.sum()
    chosen = -1
    for i in range(len(totals)):
        if chances[i] > 0.0:
            chosen = i
            left -= chances[i]
            if left < 0.0:
                break
    return chosen


@inlined
def _reason(uncached: int, queued: int, requests: int, can_ship: bool, limits: Limits) -> int:
    """Where the prompt runs beside prefill workers; `uncached` and `queued` are tokens."""
    _, _, local_tokens, local_requests, local_when_full = limits
    if uncached + queued <= local_tokens and requests < local_requests:
        return SHORT
    if local_when_full and not can_ship and queued == 0 and requests < local_requests:
        return FULL
    return BUSY if uncached <= local_tokens else SHIPPED


@inlined
def _bar(queued: int, requests: int, has_prompt: bool, limits: Limits) -> int:
    """has_prompt: the candidate runs the prompt, or somebody ships it."""
    max_requests, max_queued_tokens, _, _, _ = limits
    if queued >= max_queued_tokens:
        return QUEUE_FULL
    if requests >= max_requests:
        return NO_ROOM
    return FREE if has_prompt else NOBODY_SHIPS


@inlined
def _restored(
    first: int, end: int, weight: float, runs: bool, weights: Weights, pair_cost: float, block_size: int
) -> float:
    """What the blocks [first, end) of the prompt cost that come from a lower tier: at most what computing or receiving
    them costs, because a worker restores only what it has sooner that way."""
    most = weights[TRANSFER] * (end - first)
    if runs:
        pairs = block_size * block_size * (end * end - first * first) / 2
        most = weights[PROMPT] * min(1.0, weights[CACHED]) * (end - first + pair_cost * pairs)
    return min(most, weight * (end - first))


# Plain tuples, because numba takes 0.5 us longer to recognize a named one.
@compiled(
    together(numba.int32[::1], numba.int64[:, ::1], _FLOAT[::1], _BOOL[::1], numba.int32[:, ::1]),
    *(_INT, _INT, _BOOL, _BOOL),
    together(_INT, _INT, _INT, _INT, _BOOL),
    together(*[_FLOAT] * NUM_TERMS),
    together(_FLOAT, _FLOAT, _FLOAT),
    *(numba.int8[:, ::1], _FLOAT[:, ::1]),
    returns=_INT,
)
def choose(
    columns: tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_], NDArray[np.int32]],
    num_tokens: int,
    block_size: int,
    alone: bool,
    can_ship: bool,
    limits: Limits,
    weights: Weights,
    dice: tuple[float, float, float],
    codes: NDArray[np.int8],
    costs: NDArray[np.float64],
) -> int:
    """Index of the cheapest candidate that is not barred; -1: all are barred.

    Equal costs are decided by `draw` from [0, 1). Above temperature 0 the draw is from the softmax over
    -(total - lowest) / (highest - lowest) / temperature.
    columns: cached blocks [n]; load [n, 4] as LoadView's fields; blocks stored lately [n]; excluded [n], [0] for none;
        those of the cached blocks in host memory and on disk [2, n], [2, 0] for none.
    alone: whoever is chosen runs the prompt. can_ship: a prefill worker takes the prompt.
    limits: requests and queued tokens of a candidate; tokens, requests of local prefill, and whether it helps out.
    dice: what one pair of tokens costs in attention, in blocks; temperature; draw.
    codes, filled here: reasons and barred [2, n]. costs, filled here: terms and their sum [n, NUM_TERMS + 1].
    """
    cached, load, stored, excluded, lower = columns
    pair_cost, temperature, draw = dice
    reasons, barred, totals = codes[0], codes[1], costs[:, NUM_TERMS]
    prompt_blocks = -(-num_tokens // block_size)
    prompt = prompt_blocks + pair_cost * num_tokens * num_tokens / 2
    for i in range(len(cached)):
        requests, queued, active, pairs = load[i, 0], load[i, 1], load[i, 2], load[i, 3]
        cached_blocks = min(cached[i], (num_tokens - 1) // block_size)  # the last token is computed, for its logits
        cached_tokens = cached_blocks * block_size
        uncached = num_tokens - cached_tokens
        reasons[i] = ALONE if alone else _reason(uncached, queued, requests, can_ship, limits)
        runs = reasons[i] >= RUNS_PROMPT
        saved = cached_blocks + pair_cost * cached_tokens * cached_tokens / 2 if runs else 0.0
        computed = prompt
        if runs:
            computed = prompt + queued / block_size + pair_cost * pairs - weights[CACHED] * saved
        costs[i, PROMPT] = weights[PROMPT] * prompt
        costs[i, CACHED] = 0.0 - weights[PROMPT] * weights[CACHED] * saved  # never -0.0
        costs[i, QUEUED] = weights[QUEUED] * (queued / block_size + pair_cost * pairs) if runs else 0.0
        costs[i, TRANSFER] = 0.0 if runs else weights[TRANSFER] * (prompt_blocks - cached_blocks)
        costs[i, HOST] = costs[i, DISK] = 0.0
        if lower.shape[1]:
            in_host = min(cached_blocks, cached[i] - lower[0, i] - lower[1, i])
            on_disk = min(cached_blocks, cached[i] - lower[1, i])
            costs[i, HOST] = _restored(in_host, on_disk, weights[HOST], runs, weights, pair_cost, block_size)
            costs[i, DISK] = _restored(on_disk, cached_blocks, weights[DISK], runs, weights, pair_cost, block_size)
        costs[i, LOAD] = weights[LOAD] * active
        costs[i, EVICTION] = weights[EVICTION] * stored[i]
        # What is computed is weighted once, as a sum: it is mostly exact, so that equal work makes equal costs.
        total = weights[PROMPT] * computed
        for term in range(TRANSFER, NUM_TERMS):
            total += costs[i, term]
        totals[i] = total
        if len(excluded) and excluded[i]:
            barred[i] = EXCLUDED
        else:
            barred[i] = _bar(queued, requests, can_ship or runs, limits)
    return _draw(barred, totals, temperature, draw)
