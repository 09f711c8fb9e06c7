"""What a candidate costs, in milliseconds: one row per term, and the compiled loop that computes all candidates' terms.

A term is added in two places: its row in TERMS (and its number below), and its formula in `choose`. `baton events
explain`, its gRPC message and the sums over the terms iterate over the rows.
"""

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton_proto.generated import inference_pb2 as pb
from runtime.compiled import compiled, inlined
from runtime.config.step_times import decode_time, prefill_time


class Term(NamedTuple):
    name: str  # on the wire and in JSON
    heading: str  # of its column in `baton events explain`
    meaning: str  # below that table
    key: str  # of PlacementConfig: what the amount is multiplied with; empty: nothing


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
TOTAL, TTFT = NUM_TERMS, NUM_TERMS + 1  # columns behind the terms

STEPS_TO_FIRST: Final = 1.5  # decode steps until a prompt's first token: half of the present one, one beside it
EVICTED: Final = 0.5  # ms that are computed again for each ms of new blocks, where half of the KV blocks are in use
FULLEST: Final = 8.0  # blocks in use per unused one, beyond which they do not count
LOWEST: Final = 3.0  # times that the shortest queue counts beside the mean: no later prompt finds a worker sooner

Limits = tuple[int, int, int, int]  # see `choose`
Knobs = tuple[float, ...]  # see `choose`

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

_prefill_time, _decode_time = inlined(prefill_time), inlined(decode_time)


@inlined
def _draw(barred: NDArray[np.int8], costs: NDArray[np.float64], due_ms: float, temperature: float, draw: float) -> int:
    totals, ttft = costs[:, TOTAL], costs[:, TTFT]
    soonest = math.inf
    for i in range(len(totals)):
        if barred[i] == FREE:
            soonest = min(soonest, ttft[i])
    limit_ms, lowest, highest = max(due_ms, soonest), math.inf, -math.inf
    for i in range(len(totals)):
        if barred[i] == FREE and ttft[i] <= limit_ms:
            lowest, highest = min(lowest, totals[i]), max(highest, totals[i])
    chances = np.zeros(len(totals))
    for i in range(len(totals)):
        if barred[i] == FREE and ttft[i] <= limit_ms:
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
def _bar(queued: int, requests: int, excluded: bool, limits: Limits) -> int:
    max_requests, max_queued_tokens, _, _ = limits
    if excluded:
        return EXCLUDED
    if queued >= max_queued_tokens:
        return QUEUE_FULL
    return NO_ROOM if requests >= max_requests else FREE


@inlined
def _waits(
    load: NDArray[np.int64], times: NDArray[np.float64], now_us: int, barred: NDArray[np.int8]
) -> tuple[NDArray[np.float64], float, float, int]:
    """How long the prompts of each worker take from now, in ms, [n]; of those that are not barred the mean, the
    least, and how many they are. In the mean each counts by its speed, because it takes as much of what comes later.

    A worker whose step is late by its model is expected to be so late again: a hung worker looks the worse the longer
    it hangs. In mean and least it counts with no more than the time of its prompts."""
    waits, least, total, weights, count = np.zeros(len(load)), math.inf, 0.0, 0.0, 0
    for i in range(len(load)):
        prompts = 0.0
        if load[i, 1] > 0:
            prompts = _prefill_time(times[i, 0], times[i, 1], times[i, 2], load[i, 1], load[i, 3])
            waits[i] = abs(prompts - max(0, now_us - load[i, 4]) / 1e3)
        if barred[i] == FREE:
            wait, weight = min(waits[i], prompts), 1 / max(times[i, 1], 1e-9)
            least, total, weights, count = min(least, wait), total + weight * wait, weights + weight, count + 1
    return (waits, total / weights, least, count) if count else (waits, 0.0, 0.0, 0)


@inlined
def _restored(first: int, end: int, token_ms: float, most: tuple[float, float]) -> float:
    """What the tokens [first, end) of the prompt cost that come from a lower tier: at most what computing or receiving
    them costs (`most`: a token, a pair of tokens), because a worker restores only what it has sooner that way."""
    pairs = (end * end - first * first) / 2
    return min(most[0] * (end - first) + most[1] * pairs, token_ms * (end - first))


# Plain tuples, because numba takes 0.5 us longer to recognize a named one.
@compiled(
    "int64("
    "Tuple((int32[::1], int64[:, ::1], float64[:, ::1], boolean[::1], int32[:, ::1], float64[:, ::1])), "
    "int64, int64, boolean, boolean, int64, float64, "
    "UniTuple(float64, 2), UniTuple(int64, 4), UniTuple(float64, 7), UniTuple(float64, 2), "
    "int8[:, ::1], float64[:, ::1])"
)
def choose(
    columns: tuple[
        *tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.float64]],
        *tuple[NDArray[np.bool_], NDArray[np.int32], NDArray[np.float64]],
    ],
    num_tokens: int,
    block_size: int,
    alone: bool,
    decodes: bool,
    now_us: int,
    due_ms: float,
    shipper: tuple[float, float],
    limits: Limits,
    knobs: Knobs,
    dice: tuple[float, float],
    codes: NDArray[np.int8],
    costs: NDArray[np.float64],
) -> int:
    """Index of the cheapest candidate that is not barred and in time, or of the soonest when none is in time; -1: all
    are barred.

    Equal costs are decided by `draw` from [0, 1). Above temperature 0 the draw is from the softmax over
    -(total - lowest) / (highest - lowest) / temperature.
    columns: cached blocks [n]; load [n, 9], see LoadLedger.columns; step times [n, 6] as StepTimes' fields;
        excluded [n], [0] for none; those of the cached blocks in host memory and on disk [2, n], [2, 0] for none; ms
        that a token takes from there [n, 2], 0: as configured, [0, 2] for all.
    alone: whoever is chosen runs the prompt. decodes: it goes on to decode. now_us: of the load's clock.
    due_ms: when the first token is due, from now on; infinite: at no time.
    shipper: cost and time to the first token, both in ms, of the prefill worker that would take the prompt; infinite:
        there is none.
    limits: requests and queued tokens of a candidate; tokens that one beside prefill workers may compute of a prompt;
        tokens of prompts in a step.
    knobs, of PlacementConfig: decode_steps, ship_ms, ship_token_ms, host_token_ms, disk_token_ms, delay_weight,
        crowd_weight.
    dice: temperature; draw.
    codes, filled here: reasons and barred [2, n]. costs, filled here: the terms, their sum, and the time to the first
        token [n, NUM_TERMS + 2].
    """
    cached, load, times, excluded, lower, restoring = columns
    decode_steps, ship_ms, ship_token_ms, host_ms, disk_ms, delay_weight, crowd_weight = knobs
    reasons, barred = codes[0], codes[1]
    can_ship = shipper[0] < math.inf
    for i in range(len(cached)):
        barred[i] = _bar(load[i, 1], load[i, 0], len(excluded) > 0 and excluded[i], limits)
    waits, mean_ms, least_ms, count = _waits(load, times, now_us, barred)
    # What a whole prompt costs others, by its tokens and pairs: on slow workers no more than on fast ones.
    token_ms, pair_ms = times[:, 1].mean(), times[:, 2].mean()
    whole_ms = token_ms * num_tokens + pair_ms * num_tokens * num_tokens / 2
    lowest_ms = LOWEST * (1 - 1 / max(1, count)) * min(least_ms, whole_ms)
    for i in range(len(cached)):
        requests, queued = load[i, 0], load[i, 1]
        cached_blocks = min(int(cached[i]), (num_tokens - 1) // block_size)  # the last token is always computed
        start = cached_blocks * block_size
        uncached = num_tokens - start
        pairs = (num_tokens * num_tokens - start * start) / 2
        own = _prefill_time(times[i, 0], times[i, 1], times[i, 2], uncached, pairs)
        step = _decode_time(times[i, 3], times[i, 4], times[i, 5], requests, max(0, load[i, 2] * block_size - queued))
        costs[i, DECODE] = decode_steps * step if decodes and requests else 0.0
        # Until so many blocks have come free that there is room for it and those before it, beside what must be left.
        room_ms = max(0.0, (queued + uncached) / block_size + load[i, 8] - load[i, 5]) * load[i, 6] / 1e3
        wait = max(waits[i], room_ms)
        costs[i, QUEUED], costs[i, COMPUTED], costs[i, SHIP] = wait, own, 0.0
        share = (token_ms * uncached + pair_ms * pairs) / whole_ms if whole_ms > 0.0 else 0.0
        costs[i, OTHERS] = crowd_weight * share * (min(mean_ms, waits[i] + whole_ms / 4) + lowest_ms)
        reasons[i] = ALONE
        if not alone:
            # Without the floor, because a step with decodes reads the weights anyway. Another request may come.
            costs[i, OTHERS] += (times[i, 1] * uncached + times[i, 2] * pairs) * delay_weight * (requests + 1)
            way_ms = ship_ms + ship_token_ms * uncached
            local, shipped = wait + own, room_ms + shipper[1] + way_ms
            sooner = local <= shipped
            cheaper = local + costs[i, OTHERS] <= room_ms + shipper[0] + way_ms
            allowed = uncached <= limits[2]
            if allowed and (can_ship or queued == 0) and (cheaper if max(local, shipped) <= due_ms else sooner):
                reasons[i] = SHORT if can_ship else FULL
            else:
                reasons[i] = BUSY if allowed and sooner else SHIPPED
                costs[i, QUEUED], costs[i, COMPUTED] = room_ms, 0.0
                costs[i, OTHERS] = shipper[0] - shipper[1] if can_ship else 0.0
                costs[i, SHIP] = (shipper[1] if can_ship else 0.0) + way_ms
        # Computed here or received, new blocks evict cached ones, which are missed the sooner, the fewer can be cached.
        fullness = min(FULLEST, load[i, 7] / max(1.0, load[i, 5] - queued / block_size))
        costs[i, OTHERS] += EVICTED * share * whole_ms * fullness
        runs = reasons[i] >= RUNS_PROMPT
        costs[i, HOST] = costs[i, DISK] = 0.0
        if lower.shape[1]:
            in_host = min(cached_blocks, int(cached[i] - lower[0, i] - lower[1, i])) * block_size
            on_disk = min(cached_blocks, int(cached[i] - lower[1, i])) * block_size
            most = (times[i, 1], times[i, 2]) if runs else (ship_token_ms, 0.0)
            known = len(restoring) > 0
            from_host = restoring[i, 0] if known and restoring[i, 0] > 0.0 else host_ms
            from_disk = restoring[i, 1] if known and restoring[i, 1] > 0.0 else disk_ms
            costs[i, HOST] = _restored(in_host, on_disk, from_host, most)
            costs[i, DISK] = _restored(on_disk, start, from_disk, most)
        total = 0.0
        for term in range(NUM_TERMS):
            total += costs[i, term]
        costs[i, TOTAL] = total
        # A decode step beside each step of the prompts.
        beside = STEPS_TO_FIRST + ((queued + uncached) / limits[3] if runs else 0.0)
        first_step = beside * step if decodes and requests else 0.0
        costs[i, TTFT] = total - costs[i, OTHERS] - costs[i, DECODE] + first_step
        if barred[i] == FREE and not can_ship and not runs:
            barred[i] = NOBODY_SHIPS
    return _draw(barred, costs, due_ms, dice[0], dice[1])
