"""A fleet step by step as discrete events, compiled by numba: `run` simulates a list of requests to its end.

Workers are of two kinds: one runs prompts and ships their KV; the other decodes, and runs prompts where the router says
so. Without workers of the first kind all are mixed. A step runs prompt chunks and one token of each sequence beside
them, by the engine's rules (step_rule.py, scheduler.py), and lasts as long as step_times.py says. Consecutive steps
that only decode are one run up to the worker's next change; its time is their exact sum.

What is simpler than in a service: all first tokens are due at the same target; a request starts when its whole answer
fits into its worker's KV memory, so nothing is preempted; of each prompt a given part is cached by the workers of one
earlier request, and a given part by all others; a step that is submitted ahead counts only behind steps without
prompts; and the router knows at once how far a worker is.

An event is an arrival, a first token, the end of a request, or the end of a worker's step. A run counts as one event,
however many tokens it makes.

Times are in seconds, KV memory in tokens.
"""

import math
from typing import Any

from simulator.compiled import Floats, bucket, decode_seconds, entry, pairs_of, part, prefill_seconds
from simulator.requests import NOBODY
from simulator.stepwise.chunks import fits, give_chunks, place, rank_come
from simulator.stepwise.heap import pop, push
from simulator.stepwise.placing import Prompt, note_load, placed, uncached_on
from simulator.stepwise.state import (
    COME,
    COMING,
    DECODES,
    PREFILLS,
    PROMPTS,
    ROOMLESS,
    STEP_END,
    Fleet,
    State,
    Worker,
    append,
    take_out,
)
from simulator.stepwise.winner_tree import change, key_of

ENDED = -1  # in place of the number of requests that have arrived


@entry
def run(arrival_s: Floats, fleet: Fleet, state: State) -> None:
    arrived = 0
    while arrived != ENDED:
        arrived = go_on(arrived, arrival_s, fleet, state)


@part
def go_on(arrived: int, arrival_s: Floats, fleet: Fleet, state: State) -> int:
    """Simulates what comes next, after the first `arrived` requests. Returns how many have arrived then."""
    now_s, w = state.trees[STEP_END, 0].key, state.trees[STEP_END, 0].worker
    if arrived < len(arrival_s) and arrival_s[arrived] < now_s:
        _arrive(arrived, arrival_s[arrived], fleet, state)
        return arrived + 1
    if now_s == math.inf:
        return ENDED
    if state.workers[w].run:
        _end_step(w, now_s, fleet, state)
    _begin_step(w, now_s, fleet, state)
    note_load(w, fleet, state)
    return arrived


@part
def _arrive(request: int, now_s: float, fleet: Fleet, state: State) -> None:
    state.events[0] += 1
    new = state.requests[request]
    prompt = _prompt(request, state)
    p, d = placed(prompt, now_s, fleet, state)
    uncached = uncached_on(p, prompt)
    new.runs_on, new.decodes_on, new.left = p, d, uncached
    runner, decoder = state.workers[p], state.workers[d]
    if runner.queue_tokens == 0:
        runner.queue_s = now_s
    runner.queue_tokens += uncached
    runner.queue_pairs += pairs_of(prompt.tokens - uncached, uncached)
    decoder.requests += 1
    decoder.charged += prompt.tokens
    note_load(p, fleet, state)
    if p != d:
        new.first_s = fleet.ship_s + fleet.ship_token_s * uncached_on(d, prompt)
        note_load(d, fleet, state)
        append(decoder, ROOMLESS, request, state)
        _wake(d, now_s, 0, fleet, state)
    else:
        append(runner, COME, request, state)
        _wake(p, now_s, fleet.ahead[runner.kind], fleet, state)


@part
def _prompt(request: int, state: State) -> Prompt:
    it, holder, computed_on, decoded_on = state.requests[request], state.holder[request], NOBODY, NOBODY
    if holder != NOBODY:
        computed_on, decoded_on = state.requests[holder].runs_on, state.requests[holder].decodes_on
    return Prompt(it.prompt, it.left, state.elsewhere[request], computed_on, decoded_on)


@part
def _reserve(d: int, now_s: float, fleet: Fleet, state: State) -> None:
    """Sends prompts to prefill workers, between two steps, as far as the decode worker has room for them."""
    worker = state.workers[d]
    while True:
        request = worker.first[ROOMLESS]
        if request == NOBODY:
            return
        it = state.requests[request]
        if not fits(DECODES, it.prompt + it.output, fleet, worker):
            return
        worker.reserved += it.prompt + it.output
        worker.taken += 1
        take_out(worker, ROOMLESS, request, NOBODY, state)
        p = it.runs_on
        append(state.workers[p], COME, request, state)
        _wake(p, now_s, fleet.ahead[PREFILLS], fleet, state)


@part
def _wake(w: int, at_s: float, ahead: int, fleet: Fleet, state: State) -> None:
    """Something is to be done from `at_s` on: an idle worker begins then, and a run of decode steps ends with the step
    that is under way then, or `ahead` steps later."""
    worker = state.workers[w]
    if worker.run == 0:
        change(STEP_END, w, min(at_s, key_of(STEP_END, w, state.trees)), state.trees)
    elif not worker.chunks:
        steps = _steps_until(at_s - worker.began_s, fleet, worker) + ahead
        if steps < worker.run:
            worker.run = steps
            change(STEP_END, w, worker.began_s + _run_s(steps, fleet, worker), state.trees)


# --- steps ------------------------------------------------------------------------------------------------------------


@part
def _begin_step(w: int, now_s: float, fleet: Fleet, state: State) -> None:
    worker = state.workers[w]
    times = fleet.times[worker.kind]
    coming_s = math.inf
    if worker.kind == DECODES:
        coming_s = _land(w, now_s, state)
        _reserve(w, now_s, fleet, state)
    rank_come(w, fleet, state)
    tokens, pairs = give_chunks(w, fleet, state)
    worker.began_s, worker.queue_s = now_s, now_s
    end_s = coming_s
    worker.run = 0
    if tokens:
        worker.run = 1
        end_s = now_s + prefill_seconds(times[0], times[1], times[2], tokens, pairs)
        if worker.batch:
            end_s += decode_seconds(0.0, times[4], times[5], worker.batch, worker.context)
    elif worker.batch:
        worker.run = (state.ends[w, 0] >> 32) - worker.steps
        if coming_s < math.inf:
            worker.run = min(worker.run, _steps_until(coming_s - now_s, fleet, worker) + fleet.ahead[DECODES])
        end_s = now_s + _run_s(worker.run, fleet, worker)
    change(STEP_END, w, end_s, state.trees)


@part
def _end_step(w: int, now_s: float, fleet: Fleet, state: State) -> None:
    worker = state.workers[w]
    state.events[0] += 1
    if worker.batch:
        state.gaps[bucket((now_s - worker.began_s) / worker.run * 1e3)] += worker.run * worker.batch
        worker.steps += worker.run
        worker.context += worker.run * worker.batch
        worker.charged += worker.run * worker.batch
        while worker.batch and state.ends[w, 0] >> 32 <= worker.steps:
            request = pop(worker.batch, state.ends[w])
            worker.batch -= 1
            worker.context -= state.requests[request].prompt + state.requests[request].output
            _finish(w, request, now_s, state)
    if worker.chunks:
        _compute(w, now_s, fleet, state)


@part
def _run_s(steps: int, fleet: Fleet, worker: Worker) -> Any:
    """The time of `steps` in a row that only decode, each with one token more of every sequence."""
    times = fleet.times[worker.kind]
    step_s = decode_seconds(times[3], times[4], times[5], worker.batch, worker.context)
    return steps * step_s + times[5] * worker.batch * steps * (steps - 1) / 2


@part
def _steps_until(left_s: float, fleet: Fleet, worker: Worker) -> int:
    """How many decode steps in a row take `left_s` or just longer, at least 1."""
    times = fleet.times[worker.kind]
    growth_s = times[5] * worker.batch
    first_s = decode_seconds(times[3], times[4], times[5], worker.batch, worker.context) - growth_s / 2
    # root of growth_s / 2 * x^2 + first_s * x = left_s, in the form that is exact for a small growth
    steps = 2 * left_s / (first_s + math.sqrt(first_s * first_s + 2 * growth_s * max(0.0, left_s)))
    whole: int = max(1, math.ceil(steps - 1e-9))
    return whole


# --- prompts ----------------------------------------------------------------------------------------------------------


@part
def _compute(w: int, now_s: float, fleet: Fleet, state: State) -> None:
    """The chunks of the step are done."""
    worker, before, request = state.workers[w], NOBODY, state.workers[w].first[PROMPTS]
    while worker.chunks:
        it = state.requests[request]
        after, count = it.follower, it.chunk
        if count == 0:
            before, request = request, after
            continue
        worker.chunks -= 1
        worker.queue_pairs -= pairs_of(it.prompt - it.left, count)
        worker.queue_tokens -= count
        it.left -= count
        it.chunk = 0
        take_out(worker, PROMPTS, request, before, state)
        if it.left:
            place(w, request, fleet, state)
            if it.follower == after:  # it has kept its place
                before = request
        elif it.decodes_on != w:
            worker.reserved -= it.prompt
            worker.taken -= 1
            _ship(request, now_s, fleet, state)
        else:
            _first_token(w, request, now_s, state)
        request = after
    if worker.queue_tokens == 0:
        worker.queue_pairs = 0.0


@part
def _ship(request: int, now_s: float, fleet: Fleet, state: State) -> None:
    it = state.requests[request]
    it.first_s += now_s
    append(state.workers[it.decodes_on], COMING, request, state)
    _wake(it.decodes_on, it.first_s, fleet.ahead[DECODES], fleet, state)


@part
def _land(w: int, now_s: float, state: State) -> float:
    """Takes in the KV that has come, between two steps, with a first token that left at once; returns when the next
    comes."""
    worker, next_s, before, request = state.workers[w], math.inf, NOBODY, state.workers[w].first[COMING]
    while request != NOBODY:
        it = state.requests[request]
        after = it.follower
        if it.first_s <= now_s:
            take_out(worker, COMING, request, before, state)
            _first_token(w, request, it.first_s, state)
        else:
            next_s = min(next_s, it.first_s)
            before = request
        request = after
    return next_s


@part
def _first_token(w: int, request: int, at_s: float, state: State) -> None:
    worker, it = state.workers[w], state.requests[request]
    state.events[0] += 1
    it.first_s = at_s
    worker.charged += 1
    if it.output == 1:
        _finish(w, request, at_s, state)
        return
    push(worker.batch, state.ends[w], ((worker.steps + it.output - 1) << 32) + request)
    worker.batch += 1
    worker.context += it.prompt + 1


@part
def _finish(w: int, request: int, now_s: float, state: State) -> None:
    worker, it = state.workers[w], state.requests[request]
    state.events[0] += 1
    it.end_s = now_s
    worker.reserved -= it.prompt + it.output
    worker.taken -= 1
    worker.requests -= 1
    worker.charged -= it.prompt + it.output
