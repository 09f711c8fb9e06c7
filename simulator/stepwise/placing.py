"""The router's placement for fleets of equal workers, in the time of a few comparisons for any number of workers.

The costs are those of router/placement/cost.py, but for the wait for room in the KV cache and what is evicted; a test
compares the decisions. Among workers of one kind that hold the same of a prompt, only their queues w and their decode
steps g differ, and the cost is

    w + crowd * min(mean queue, w + whole / 4) + g = min(w + g + crowd * mean, (1 + crowd) * w + g + crowd * whole / 4)

Because all queues get shorter at the same speed, w + now does not change while nothing happens to a worker. Hence the
cheapest worker is the one with the least g without a queue (IDLE), or with a queue the least free_s + g (NEAR) or
(1 + crowd) * free_s + g (FAR). LEAST has the least g of all, for prompts that are shipped. The workers of a prompt's
holder, which have more of it cached, are compared with these.

The term of the shortest queue is the same for all of one kind that hold the same.

What a prompt delays where decode workers run some beside prefill workers depends on the prompt, too: up to SCANNED
decode workers are compared one by one; of more, the winners alone. Likewise `crowd` is smaller than FAR takes it where
a part of the prompt is cached.
"""

import math
from typing import Any, NamedTuple

from router.placement.cost import LOWEST, MOST_DELAYED
from simulator.compiled import decode_seconds, pairs_of, part, prefill_seconds
from simulator.requests import NOBODY
from simulator.stepwise.state import DECODES, FAR, IDLE, LEAST, NEAR, PREFILLS, Fleet, State
from simulator.stepwise.winner_tree import change

SCANNED = 32


class Prompt(NamedTuple):
    """What placement must know of a prompt."""

    tokens: int
    uncached: int  # by the workers of its holder
    elsewhere: int  # uncached by all others
    computed_on: int  # the holder's workers; NOBODY: there is no holder
    decoded_on: int


@part
def uncached_on(w: int, prompt: Prompt) -> int:
    return prompt.uncached if w == prompt.computed_on or w == prompt.decoded_on else prompt.elsewhere


@part
def note_load(w: int, fleet: Fleet, state: State) -> None:
    """Brings the router's view of a worker up to date."""
    worker = state.workers[w]
    kind, trees = worker.kind, state.trees
    row, times = 4 * kind, fleet.times[kind]
    steps_s = 0.0
    if worker.requests:
        active = max(0.0, worker.charged - worker.queue_tokens)
        steps_s = fleet.decode_steps * decode_seconds(times[3], times[4], times[5], worker.requests, active)
    if worker.free_s:
        state.backlog[kind, 0] -= worker.free_s
        state.backlog[kind, 1] -= 1
    if worker.queue_tokens:
        free_s = worker.queue_s + prefill_seconds(times[0], times[1], times[2], worker.queue_tokens, worker.queue_pairs)
        worker.free_s = free_s
        state.backlog[kind, 0] += free_s
        state.backlog[kind, 1] += 1
        change(row + IDLE, w, math.inf, trees)
        change(row + NEAR, w, free_s + steps_s, trees)
        change(row + FAR, w, (1 + fleet.crowd_weight) * free_s + steps_s, trees)
    else:
        worker.free_s = 0.0
        change(row + IDLE, w, steps_s, trees)
        change(row + NEAR, w, math.inf, trees)
        change(row + FAR, w, math.inf, trees)
    worker.steps_s = steps_s
    if kind == DECODES and fleet.workers[PREFILLS]:
        change(row + LEAST, w, steps_s, trees)


@part
def placed(prompt: Prompt, now_s: float, fleet: Fleet, state: State) -> Any:
    """(the worker that runs the prompt, the worker that decodes)."""
    _, _, local, local_s = _cheapest(DECODES, prompt, now_s, fleet, state)
    if fleet.workers[PREFILLS] == 0:
        return local, local
    p, shipped_s, keeper, best_s = _cheapest(PREFILLS, prompt, now_s, fleet, state)
    runs, decodes = keeper, keeper
    for d in (state.trees[4 * DECODES + LEAST, 0].worker, _holder(DECODES, prompt, fleet)):
        if d != NOBODY:
            way_s = fleet.ship_s + fleet.ship_token_s * uncached_on(d, prompt)
            cost_s = shipped_s + way_s + state.workers[d].steps_s
            if cost_s < best_s:
                runs, decodes, best_s = p, d, cost_s
    if local_s <= best_s:
        return local, local
    return runs, decodes


@part
def _cheapest(kind: int, prompt: Prompt, now_s: float, fleet: Fleet, state: State) -> Any:
    """(the worker that runs the prompt for the least, that cost, the worker that also decodes for the least, that
    cost), with its decode steps; (NOBODY, inf) where none may decode what it runs."""
    times, row, count, tokens = fleet.times[kind], 4 * kind, fleet.workers[kind], prompt.tokens
    whole_s = times[1] * tokens + times[2] * pairs_of(0, tokens)
    mean_s = max(0.0, state.backlog[kind, 0] - state.backlog[kind, 1] * now_s) / count
    first = 0 if kind == PREFILLS else fleet.workers[PREFILLS]
    lowest_s = LOWEST * (1 - 1 / count) * min(_shortest_s(kind, first, now_s, fleet, state), whole_s)
    keep_steps = fleet.keep_steps if kind == PREFILLS else 0.0
    first_answer_s = keep_steps * decode_seconds(times[3], times[4], times[5], 1, 0)
    holder, scans = _holder(kind, prompt, fleet), fleet.workers[PREFILLS] > 0 and count <= SCANNED
    choices = count if scans else FAR
    own_s, crowd, delay_s, may_decode = _own(kind, prompt.elsewhere, whole_s, prompt, fleet)
    best, best_s, keeper, kept_s = NOBODY, math.inf, NOBODY, math.inf
    for number in range(choices + (holder != NOBODY)):
        w = first + number
        if number == choices:  # behind the others: it may have been one of them, with what they hold
            w = holder
            own_s, crowd, delay_s, may_decode = _own(kind, prompt.uncached, whole_s, prompt, fleet)
        elif not scans:
            winner = state.trees[row + IDLE + number, 0]
            if winner.key == math.inf:
                continue
            w = winner.worker
        worker = state.workers[w]
        wait_s = max(0.0, worker.free_s - now_s)
        cost_s = wait_s + own_s + crowd * (min(mean_s, wait_s + whole_s / 4) + lowest_s) + worker.steps_s
        cost_s += delay_s * min(MOST_DELAYED, worker.requests + (kind == DECODES))
        if cost_s < best_s:
            best, best_s = w, cost_s
        if worker.requests == 0:
            cost_s += first_answer_s
        if may_decode and cost_s < kept_s:
            keeper, kept_s = w, cost_s
    return best, best_s, keeper, kept_s


@part
def _holder(kind: int, prompt: Prompt, fleet: Fleet) -> int:
    """The only worker of a kind that ran or decoded the prompt's holder."""
    if kind == PREFILLS:
        return prompt.computed_on if prompt.computed_on < fleet.workers[PREFILLS] else NOBODY
    return prompt.decoded_on if prompt.decoded_on >= fleet.workers[PREFILLS] else NOBODY


@part
def _own(kind: int, uncached: int, whole_s: float, prompt: Prompt, fleet: Fleet) -> Any:
    """What depends on the tokens to compute: (their time, the weight of what others wait, what they delay a request,
    whether the worker may also decode)."""
    times, pairs = fleet.times[kind], pairs_of(prompt.tokens - uncached, uncached)
    computing_s = times[1] * uncached + times[2] * pairs
    crowd = fleet.crowd_weight * computing_s / whole_s if whole_s > 0.0 else 0.0
    splits = fleet.workers[PREFILLS] > 0
    delay_s = fleet.delay_weight * computing_s if splits else 0.0
    may_decode = not splits or uncached <= fleet.local_prefill_tokens
    return prefill_seconds(times[0], times[1], times[2], uncached, pairs), crowd, delay_s, may_decode


@part
def _shortest_s(kind: int, first: int, now_s: float, fleet: Fleet, state: State) -> Any:
    """The shortest queue of one kind; beyond SCANNED workers, that of the one with the least wait and steps."""
    if state.backlog[kind, 1] < fleet.workers[kind]:
        return 0.0
    free_s = state.workers[state.trees[4 * kind + NEAR, 0].worker].free_s
    if fleet.workers[kind] <= SCANNED:
        for w in range(first, first + fleet.workers[kind]):
            free_s = min(free_s, state.workers[w].free_s)
    return max(0.0, free_s - now_s)
