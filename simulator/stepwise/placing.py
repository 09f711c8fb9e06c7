"""The router's placement for fleets of equal workers, in the time of a few comparisons for any number of workers.

The costs are those of router/placement/cost.py, but for the wait for room in the KV cache and what is evicted; a test
compares the decisions. Among workers of one kind that hold the same of a prompt, only their queues w and their decode
steps g differ, and the cost is

    w + crowd * min(mean queue, w + whole / 4) + g = min(w + g + crowd * mean, (1 + crowd) * w + g + crowd * whole / 4)

Because all queues get shorter at the same speed, w + now does not change while nothing happens to a worker. Hence the
cheapest worker is the one with the least g without a queue (IDLE), or with a queue the least free_s + g (NEAR) or
(1 + crowd) * free_s + g (FAR). LEAST has the least g of all, for prompts that are shipped.

The term of the shortest queue is the same for all of one kind: it matters between shipping and computing alone.

What a prompt delays where decode workers run some beside prefill workers depends on the prompt, too: up to SCANNED
decode workers are compared one by one; of more, the winners alone. Likewise `crowd` is smaller than FAR takes it where
a part of the prompt is cached.
"""

import math
from typing import Any

from router.placement.cost import LOWEST, MOST_DELAYED
from simulator.compiled import decode_seconds, pairs_of, part, prefill_seconds
from simulator.stepwise.state import DECODES, FAR, IDLE, LEAST, NEAR, NOBODY, PREFILLS, Fleet, State
from simulator.stepwise.winner_tree import change

SCANNED = 32


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
def placed(prompt: int, uncached: int, now_s: float, fleet: Fleet, state: State) -> Any:
    """(the worker that runs the prompt, the worker that decodes)."""
    local, local_s, local_steps_s, _, _ = _cheapest(DECODES, prompt, uncached, now_s, fleet, state)
    if fleet.workers[PREFILLS] == 0:
        return local, local
    p, shipped_s, steps_s, keeper, best_s = _cheapest(PREFILLS, prompt, uncached, now_s, fleet, state)
    runs, decodes = keeper, keeper
    d = state.trees[4 * DECODES + LEAST, 0].worker
    shipped_s += steps_s + fleet.ship_s + fleet.ship_token_s * uncached
    if shipped_s + state.workers[d].steps_s < best_s:
        runs, decodes, best_s = p, d, shipped_s + state.workers[d].steps_s
    if uncached <= fleet.local_prefill_tokens and local_s <= shipped_s and local_s + local_steps_s <= best_s:
        return local, local
    return runs, decodes


@part
def _cheapest(kind: int, prompt: int, uncached: int, now_s: float, fleet: Fleet, state: State) -> Any:
    """(worker, what the prompt costs there, what its decode steps cost), of all that run prompts; (worker, all that it
    costs) where the one that runs the prompt decodes."""
    times, row = fleet.times[kind], 4 * kind
    pairs = pairs_of(prompt - uncached, uncached)
    computing_s = times[1] * uncached + times[2] * pairs
    whole_s = times[1] * prompt + times[2] * pairs_of(0, prompt)
    crowd = fleet.crowd_weight * computing_s / whole_s if whole_s > 0.0 else 0.0
    own_s = prefill_seconds(times[0], times[1], times[2], uncached, pairs)
    mean_s = max(0.0, state.backlog[kind, 0] - state.backlog[kind, 1] * now_s) / fleet.workers[kind]
    first = 0 if kind == PREFILLS else fleet.workers[PREFILLS]
    lowest_s = LOWEST * (1 - 1 / fleet.workers[kind]) * min(_shortest_s(kind, first, now_s, fleet, state), whole_s)
    delay_s = fleet.delay_weight * computing_s if fleet.workers[PREFILLS] else 0.0
    first_answer_s = fleet.keep_steps * decode_seconds(times[3], times[4], times[5], 1, 0)
    may_keep = uncached <= fleet.local_prefill_tokens
    scans = fleet.workers[PREFILLS] > 0 and fleet.workers[kind] <= SCANNED
    best, best_s, best_steps_s, keeper, kept_s = NOBODY, math.inf, 0.0, NOBODY, math.inf
    for number in range(fleet.workers[kind] if scans else FAR):
        w = first + number
        if not scans:
            winner = state.trees[row + IDLE + number, 0]
            if winner.key == math.inf:
                continue
            w = winner.worker
        worker = state.workers[w]
        wait_s = max(0.0, worker.free_s - now_s)
        cost_s = wait_s + own_s + crowd * (min(mean_s, wait_s + whole_s / 4) + lowest_s)
        cost_s += delay_s * min(MOST_DELAYED, worker.requests + (kind == DECODES))
        whole_cost_s = cost_s + worker.steps_s
        if best == NOBODY or whole_cost_s < best_s + best_steps_s:
            best, best_s, best_steps_s = w, cost_s, worker.steps_s
        if worker.requests == 0:
            whole_cost_s += first_answer_s
        if may_keep and whole_cost_s < kept_s:
            keeper, kept_s = w, whole_cost_s
    return best, best_s, best_steps_s, keeper, kept_s


@part
def _shortest_s(kind: int, first: int, now_s: float, fleet: Fleet, state: State) -> Any:
    """The shortest queue of one kind; beyond SCANNED workers, that of the one with the least wait and steps."""
    if fleet.workers[PREFILLS] == 0 or state.backlog[kind, 1] < fleet.workers[kind]:
        return 0.0
    free_s = state.workers[state.trees[4 * kind + NEAR, 0].worker].free_s
    if fleet.workers[kind] <= SCANNED:
        for w in range(first, first + fleet.workers[kind]):
            free_s = min(free_s, state.workers[w].free_s)
    return max(0.0, free_s - now_s)
