"""What a candidate costs, in milliseconds: one row per term, and the compiled loop that computes all candidates' terms.

A term is added in two places: its row in TERMS (and its number below), and its formula in `_price`. `baton events
explain`, its gRPC message and the sums over the terms iterate over the rows.
"""

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton_proto.generated import inference_pb2 as pb
from router.workers.account import (
    ACTIVE_BLOCKS,
    FREED_US,
    QUEUED_PAIRS,
    QUEUED_TOKENS,
    REQUESTS,
    RESERVED_BLOCKS,
    STEP_BEGAN_US,
    UNUSED_BLOCKS,
    USED_BLOCKS,
)
from runtime.compiled import compiled, inlined
from runtime.config.step_times import decode_time, prefill_time
from runtime.step_rule import prompt_ms


class Term(NamedTuple):
    name: str  # on the wire and in JSON
    heading: str  # of its column in `baton events explain`
    meaning: str  # below that table
    key: str  # of Weights: what the amount is multiplied with; empty: nothing


TERMS: Final = (
    Term("queued", "queued", "the wait for prompts before it or for KV room", ""),
    Term("computed", "+ own", "computing what is not cached", ""),
    Term("decode", "+ decode", "decode steps of the worker", "decode_steps"),
    Term("shipped", "+ shipped", "tokens shipped", "ship_token_ms"),
    Term("host", "+ from host", "tokens from host memory, or as it measured", "host_token_ms"),
    Term("disk", "+ from disk", "tokens from disk, or as it measured", "disk_token_ms"),
    Term("others", "+ others", "what it costs others", ""),
)
NUM_TERMS: Final = len(TERMS)
QUEUED, COMPUTED, DECODE, SHIP, HOST, DISK, OTHERS = range(NUM_TERMS)
TOTAL, TTFT, KEPT = range(NUM_TERMS, NUM_TERMS + 3)  # columns behind the terms
NUM_COSTS: Final = NUM_TERMS + 3
REASON, BARRED = range(2)  # rows of the codes

STEPS_TO_FIRST: Final = 1.5  # decode steps before a prompt's first step: half of the present one, and the next one
EVICTED: Final = 0.5  # ms that are computed again for each ms of new blocks, where half of the KV blocks are in use
FULLEST: Final = 8.0  # blocks in use per unused one, beyond which they do not count
MOST_DELAYED: Final = 8  # requests that a prompt delays; with more, prompts would queue elsewhere for them
LOWEST: Final = 3.0  # times that the shortest queue counts beside the mean: no later prompt finds a worker sooner

# Where the prompt of a candidate would run and why. SHORT and above: on the candidate itself.
SHIPPED: Final = pb.PLACEMENT_REASON_SHIPPED
BUSY: Final = pb.PLACEMENT_REASON_DECODE_BUSY
SHORT: Final = pb.PLACEMENT_REASON_SHORT_PROMPT
FULL: Final = pb.PLACEMENT_REASON_PREFILL_FULL
ALONE: Final = pb.PLACEMENT_REASON_NO_PREFILL
KEEPS: Final = pb.PLACEMENT_REASON_KEPT
RUNS_PROMPT: Final = SHORT

# What candidates do: run prompts and decode; the same where prefill workers may take the prompt; ship prompts or keep
# their answers.
MIXED, RECEIVES, SHIPS = range(3)

# Why a candidate cannot be chosen.
FREE: Final = pb.BARRED_REASON_UNSPECIFIED
EXCLUDED: Final = pb.BARRED_REASON_EXCLUDED
QUEUE_FULL: Final = pb.BARRED_REASON_QUEUE_FULL
NO_ROOM: Final = pb.BARRED_REASON_NO_ROOM
NOBODY_SHIPS: Final = pb.BARRED_REASON_PREFILL_FULL

Columns = tuple[
    NDArray[np.int32],  # cached blocks [n]
    NDArray[np.int64],  # load [n, 9], see account.py
    NDArray[np.float64],  # step times [n, 6] in ms
    NDArray[np.bool_],  # excluded [n]; [0]: nobody is
    NDArray[np.int32],  # those of the cached blocks in host memory and on disk [2, n]; [2, 0]: none are
    NDArray[np.float64],  # ms that a token takes from there [n, 2], 0: as configured; [0, 2]: all as configured
]
Limits = tuple[int, int, int]  # a candidate's requests; its queued tokens; those of a prompt that is not shipped
Shipper = tuple[float, float]  # see _where
Knobs = tuple[float, ...]  # values of PlacementConfig, see `choose`

FLOOR, TOKEN, PAIR, DECODE_FLOOR, SEQUENCE, CONTEXT = range(6)  # columns of step times: the fields of StepTimes

_prefill_time, _decode_time = inlined(prefill_time), inlined(decode_time)
_prompt_ms = inlined(prompt_ms)


@inlined
def _draw(barred: NDArray[np.int8], costs: NDArray[np.float64], column: int, due_ms: float, draw: float) -> int:
    """Index of the candidate with the least cost in a column among those that are in time; where none is, of the
    soonest."""
    totals, ttft = costs[:, column], costs[:, TTFT]
    soonest = math.inf
    for i in range(len(totals)):
        if barred[i] == FREE and totals[i] < math.inf:
            soonest = min(soonest, ttft[i])
    limit_ms, lowest, count = max(due_ms, soonest), math.inf, 0
    for i in range(len(totals)):
        if barred[i] == FREE and ttft[i] <= limit_ms and totals[i] <= lowest and totals[i] < math.inf:
            count = count + 1 if totals[i] == lowest else 1
            lowest = totals[i]
    left, chosen = int(draw * count), -1
    for i in range(len(totals)):
        if left >= 0 and barred[i] == FREE and ttft[i] <= limit_ms and totals[i] == lowest and lowest < math.inf:
            left, chosen = left - 1, i
    return chosen


@inlined
def _bar(queued: int, requests: int, excluded: bool, does: int, limits: Limits) -> int:
    max_requests, max_queued_tokens, _ = limits
    if excluded:
        return EXCLUDED
    if does == SHIPS:
        return QUEUE_FULL if queued >= max_queued_tokens else FREE
    return NO_ROOM if requests >= max_requests else FREE


@inlined
def _computing_ms(times: NDArray[np.float64], i: int, tokens: float, pairs: float) -> float:
    took_ms: float = _prefill_time(times[i, FLOOR], times[i, TOKEN], times[i, PAIR], tokens, pairs)
    return took_ms


@inlined
def _waits(
    load: NDArray[np.int64], times: NDArray[np.float64], now_us: int, barred: NDArray[np.int8]
) -> tuple[NDArray[np.float64], float, float, int]:
    """How long the prompts of each worker take from now, in ms, [n]; the mean and the least of those that are not
    barred; their number. In the mean each counts by its speed, because it takes as much of what comes later.

    If a step overruns its prediction by x ms, x more are expected; so a hung worker looks worse the longer it hangs. In
    mean and least it counts with no more than the time of its prompts."""
    waits, least, total, weights, count = np.zeros(len(load)), math.inf, 0.0, 0.0, 0
    for i in range(len(load)):
        prompts = 0.0
        if load[i, QUEUED_TOKENS] > 0:
            prompts = _computing_ms(times, i, load[i, QUEUED_TOKENS], load[i, QUEUED_PAIRS])
            waits[i] = abs(prompts - max(0, now_us - load[i, STEP_BEGAN_US]) / 1e3)
        if barred[i] == FREE:
            wait, weight = min(waits[i], prompts), 1 / max(times[i, TOKEN], 1e-9)
            least, total, weights, count = min(least, wait), total + weight * wait, weights + weight, count + 1
    return (waits, total / weights, least, count) if count else (waits, 0.0, 0.0, 0)


@inlined
def _room_ms(load: NDArray[np.int64], i: int, blocks: float) -> float:
    """The time until so many blocks are free that `blocks` fit beside those that must be left."""
    missing = max(0.0, blocks + load[i, RESERVED_BLOCKS] - load[i, UNUSED_BLOCKS])
    room_ms: float = missing * load[i, FREED_US] / 1e3
    return room_ms


@inlined
def _fullness(load: NDArray[np.int64], i: int, queued_blocks: float) -> float:
    """Computed here or received, new blocks evict cached ones, which are missed the sooner, the fewer can be cached."""
    fullness: float = min(FULLEST, load[i, USED_BLOCKS] / max(1.0, load[i, UNUSED_BLOCKS] - queued_blocks))
    return fullness


@inlined
def _where(
    local_ms: float,
    others_ms: float,
    room_ms: float,
    way_ms: float,
    shipper: Shipper,
    due_ms: float,
    short: bool,
    idle: bool,
) -> int:
    """Where a prompt runs that prefill workers may take, and why.

    local_ms: until its first token when the candidate runs it; others_ms: what that costs others.
    room_ms, way_ms: the candidate's wait for room and the way to it, when the prompt is shipped.
    shipper: cost and time to the first token, both in ms, of the prefill worker that would take it; infinite: none.
    short: it is short enough to run on a decode worker. idle: the candidate has no queued prompt."""
    can_ship = shipper[0] < math.inf
    shipped_ms = room_ms + shipper[1] + way_ms
    sooner = local_ms <= shipped_ms
    cheaper = local_ms + others_ms <= room_ms + shipper[0] + way_ms
    if short and (can_ship or idle) and (cheaper if max(local_ms, shipped_ms) <= due_ms else sooner):
        return SHORT if can_ship else FULL
    return BUSY if short and sooner else SHIPPED


@inlined
def _beside_ms(
    times: NDArray[np.float64],
    i: int,
    prompts_ms: float,
    readers_ms: float,
    num_readers: int,
    ttft_ms: float,
    itl_ms: float,
) -> float:
    """What running answers take until prompts of so many ms are computed: steps before the first of them, and their
    part of each that the prompts share. In the mean half of them are left meanwhile."""
    left_ms, floor_ms, decode_floor_ms = prompts_ms / 2, times[i, FLOOR], times[i, DECODE_FLOOR]
    share_ms = _prompt_ms(floor_ms, decode_floor_ms, readers_ms, num_readers, left_ms, itl_ms, ttft_ms)
    beside_ms: float = STEPS_TO_FIRST * (times[i, DECODE_FLOOR] + readers_ms) + prompts_ms / share_ms * readers_ms
    return beside_ms


@inlined
def _restored(first: int, end: int, token_ms: float, most: tuple[float, float]) -> float:
    """What the tokens [first, end) of the prompt cost that come from a lower tier: at most what computing or receiving
    them costs (`most`: a token, a pair of tokens), because a worker restores only what it has sooner that way."""
    pairs = (end * end - first * first) / 2
    return min(most[0] * (end - first) + most[1] * pairs, token_ms * (end - first))


@inlined
def _restore(
    columns: Columns,
    i: int,
    cached_blocks: int,
    block_size: int,
    usual_ms: tuple[float, float],
    most: tuple[float, float],
    costs: NDArray[np.float64],
) -> None:
    """Fills in what cached blocks cost that lie in host memory or on disk. usual_ms: a token from there, as configured.
    most: see _restored."""
    cached, _, _, _, lower, restoring = columns
    costs[i, HOST] = costs[i, DISK] = 0.0
    if lower.shape[1]:
        in_host = min(cached_blocks, int(cached[i] - lower[0, i] - lower[1, i])) * block_size
        on_disk = min(cached_blocks, int(cached[i] - lower[1, i])) * block_size
        known = len(restoring) > 0
        host_ms = restoring[i, 0] if known and restoring[i, 0] > 0.0 else usual_ms[0]
        disk_ms = restoring[i, 1] if known and restoring[i, 1] > 0.0 else usual_ms[1]
        costs[i, HOST] = _restored(in_host, on_disk, host_ms, most)
        costs[i, DISK] = _restored(on_disk, cached_blocks * block_size, disk_ms, most)


@inlined
def _keeping_ms(
    times: NDArray[np.float64], i: int, requests: int, uncached: int, limits: Limits, keep_steps: float
) -> float:
    """What it costs besides that candidate i keeps the answer of a prompt that it may ship; infinite: it may not."""
    if requests >= limits[0] or uncached > limits[2]:
        return math.inf
    if requests:
        return 0.0
    first_ms: float = _decode_time(times[i, DECODE_FLOOR], times[i, SEQUENCE], times[i, CONTEXT], 1, 0)
    return keep_steps * first_ms


@inlined
def _price(
    columns: Columns,
    i: int,
    num_tokens: int,
    block_size: int,
    does: int,
    due_ms: float,
    shipper: Shipper,
    limits: Limits,
    knobs: Knobs,
    wait_ms: float,
    crowd: tuple[float, float, float, float, float],
    costs: NDArray[np.float64],
) -> int:
    """Fills in what candidate i costs; returns where the prompt would run and why. wait_ms: its queued prompts."""
    cached, load, times, _, _, _ = columns
    decode_steps, ship_ms, ship_token_ms, host_ms, disk_ms, delay_weight, crowd_weight = knobs[:7]
    ttft_ms, itl_ms, keep_steps = knobs[7:]
    token_ms, pair_ms, whole_ms, mean_ms, lowest_ms = crowd
    requests, queued = load[i, REQUESTS], load[i, QUEUED_TOKENS]
    cached_blocks = min(int(cached[i]), (num_tokens - 1) // block_size)  # the last token is always computed
    start = cached_blocks * block_size
    uncached, pairs = num_tokens - start, (num_tokens * num_tokens - start * start) / 2
    own_ms = _computing_ms(times, i, uncached, pairs)
    context = max(0, load[i, ACTIVE_BLOCKS] * block_size - queued)
    readers_ms = _decode_time(0.0, times[i, SEQUENCE], times[i, CONTEXT], requests, context)
    step_ms = times[i, DECODE_FLOOR] + readers_ms
    room_ms = _room_ms(load, i, (queued + uncached) / block_size)
    queued_ms = max(wait_ms, room_ms)
    share = (token_ms * uncached + pair_ms * pairs) / whole_ms if whole_ms > 0.0 else 0.0
    others_ms = crowd_weight * share * (min(mean_ms, wait_ms + whole_ms / 4) + lowest_ms)
    way_ms = ship_ms + ship_token_ms * uncached
    reason: int = ALONE
    if does != MIXED:
        # Without the floor, because a step with decodes reads the weights anyway. On a decode worker another may come.
        delayed = min(MOST_DELAYED, requests + (does == RECEIVES))
        others_ms += (times[i, TOKEN] * uncached + times[i, PAIR] * pairs) * delay_weight * delayed
    if does == RECEIVES:
        short = uncached <= limits[2]
        reason = _where(queued_ms + own_ms, others_ms, room_ms, way_ms, shipper, due_ms, short, queued == 0)
    runs = reason >= RUNS_PROMPT
    costs[i, QUEUED], costs[i, COMPUTED], costs[i, SHIP] = queued_ms, own_ms, 0.0
    if not runs:
        can_ship = shipper[0] < math.inf
        costs[i, QUEUED], costs[i, COMPUTED], costs[i, SHIP] = room_ms, 0.0, (shipper[1] if can_ship else 0.0) + way_ms
        others_ms = shipper[0] - shipper[1] if can_ship else 0.0
    costs[i, OTHERS] = others_ms + EVICTED * share * whole_ms * _fullness(load, i, queued / block_size)
    costs[i, DECODE] = decode_steps * step_ms if requests else 0.0
    most = (times[i, TOKEN], times[i, PAIR]) if runs else (ship_token_ms, 0.0)
    _restore(columns, i, cached_blocks, block_size, (host_ms, disk_ms), most, costs)
    total = 0.0
    for term in range(NUM_TERMS):
        total += costs[i, term]
    prompts_ms = wait_ms + own_ms if runs else 0.0
    beside_ms = _beside_ms(times, i, prompts_ms, readers_ms, requests, ttft_ms, itl_ms) if requests else 0.0
    costs[i, TOTAL] = total
    costs[i, KEPT] = total + _keeping_ms(times, i, requests, uncached, limits, keep_steps)
    costs[i, TTFT] = total - costs[i, OTHERS] - costs[i, DECODE] + beside_ms
    return reason


# Plain tuples, because numba takes 0.5 us longer to recognize a named one.
@compiled(
    "UniTuple(int64, 2)("
    "Tuple((int32[::1], int64[:, ::1], float64[:, ::1], boolean[::1], int32[:, ::1], float64[:, ::1])), "
    "int64, int64, int64, int64, float64, "
    "UniTuple(float64, 2), UniTuple(int64, 3), UniTuple(float64, 10), float64, "
    "int8[:, ::1], float64[:, ::1])"
)
def choose(
    columns: Columns,
    num_tokens: int,
    block_size: int,
    does: int,
    now_us: int,
    due_ms: float,
    shipper: Shipper,
    limits: Limits,
    knobs: Knobs,
    draw: float,
    codes: NDArray[np.int8],
    costs: NDArray[np.float64],
) -> tuple[int, int]:
    """(chosen, keeper): indices of the cheapest candidate that is not barred and in time, or of the soonest when none
    is in time; -1: none takes the request. The keeper is the cheapest prefill worker that would also keep the answer.
    Fills codes [2, n] with reasons and barred, and costs [n, NUM_COSTS] with the terms, their sum, the time to the
    first token, and the sum where the candidate keeps the answer of a prompt that it may ship; infinite: it may
    not.

    does: MIXED, RECEIVES or SHIPS. now_us: of the load's clock.
    due_ms: when the first token is due, from now on; infinite: at no time.
    draw: from [0, 1); decides between equal costs.
    """
    cached, load, times, excluded, _, _ = columns
    reasons, barred = codes[REASON], codes[BARRED]
    for i in range(len(cached)):
        barred[i] = _bar(load[i, QUEUED_TOKENS], load[i, REQUESTS], len(excluded) > 0 and excluded[i], does, limits)
    waits, mean_ms, least_ms, count = _waits(load, times, now_us, barred)
    # What a whole prompt costs others, by its tokens and pairs: on slow workers no more than on fast ones.
    token_ms, pair_ms = times[:, TOKEN].mean(), times[:, PAIR].mean()
    whole_ms = token_ms * num_tokens + pair_ms * num_tokens * num_tokens / 2
    lowest_ms = LOWEST * (1 - 1 / max(1, count)) * min(least_ms, whole_ms)
    crowd = (token_ms, pair_ms, whole_ms, mean_ms, lowest_ms)
    for i in range(len(cached)):
        reasons[i] = _price(
            columns, i, num_tokens, block_size, does, due_ms, shipper, limits, knobs, waits[i], crowd, costs
        )
        if barred[i] == FREE and not shipper[0] < math.inf and reasons[i] < RUNS_PROMPT:
            barred[i] = NOBODY_SHIPS
    keeper = _draw(barred, costs, KEPT, due_ms, draw) if does == SHIPS else -1
    return _draw(barred, costs, TOTAL, due_ms, draw), keeper
