"""Which prompts a step computes and how much of each: by the rule of runtime/step_rule.py, as the engine's scheduler.

The order among prompts does not change while they wait, because all age alike. Hence the prompts of a worker are a list
in that order; a prompt moves forward in it when a part of it is computed. The rule's functions work in seconds, too.
"""

from typing import Any

from runtime.step_rule import in_tiles, prompt_ms, rank, tokens_within
from simulator.compiled import decode_seconds, pairs_of, part
from simulator.requests import NOBODY
from simulator.stepwise.state import COME, PROMPTS, Fleet, State, Worker, take_out

# As in engine/core; a test compares them.
RANKED, LOOK_AHEAD, LEAST_TOKENS = 128, 8, 16

_rank, _prompt_s = part(rank), part(prompt_ms)
_tokens_within, _in_tiles = part(tokens_within), part(in_tiles)


@part
def rank_come(w: int, fleet: Fleet, state: State) -> None:
    """Gives the prompts that have come their places among the others, in order of arrival, up to RANKED that wait."""
    worker = state.workers[w]
    while worker.ranked < RANKED and worker.first[COME] != NOBODY:
        request = worker.first[COME]
        take_out(worker, COME, request, NOBODY, state)
        worker.ranked += 1
        place(w, request, fleet, state)


@part
def place(w: int, request: int, fleet: Fleet, state: State) -> None:
    """Puts a prompt into the list; among equals the one that came first goes first."""
    worker, requests, it = state.workers[w], state.requests, state.requests[request]
    it.rank_s = _rank(_work_s(request, fleet.times[worker.kind], state), -it.arrival_s)
    before, after = NOBODY, worker.first[PROMPTS]
    while after != NOBODY:
        other_s = requests[after].rank_s
        if other_s > it.rank_s or (other_s == it.rank_s and after > request):
            break
        before, after = after, requests[after].follower
    it.follower = after
    if before == NOBODY:
        worker.first[PROMPTS] = request
    else:
        requests[before].follower = request
    if after == NOBODY:
        worker.last[PROMPTS] = request


@part
def give_chunks(w: int, fleet: Fleet, state: State) -> Any:
    """Chooses the chunks of the next step and begins prompts. Returns the tokens and pairs of the chunks."""
    worker, request, tokens, pairs = state.workers[w], state.workers[w].first[PROMPTS], 0, 0.0
    worker.chunks = 0
    room = fleet.max_batch_tokens[worker.kind] - worker.batch
    if request == NOBODY or room <= 0:
        return tokens, pairs
    times, budget_s, seen, starved = fleet.times[worker.kind], _budget_s(w, fleet, state), 0, False
    while request != NOBODY:
        it = state.requests[request]
        start, after = it.prompt - it.left, it.follower
        count = _tokens_within(budget_s, times[1], times[2], start, it.left)
        if worker.chunks and (room <= 0 or count == 0):
            break
        if not it.begun and seen < LOOK_AHEAD and not starved:
            seen += 1
            starved = not _begins(request, fleet, worker, state)
        if it.begun:
            it.chunk = min(it.left, room, max(count, 1 if worker.chunks else LEAST_TOKENS))
            is_cut = it.chunk < it.left
            if is_cut:
                it.chunk = _in_tiles(worker.batch + tokens, it.chunk)
            worker.chunks += 1
            of_chunk = pairs_of(start, it.chunk)
            tokens, pairs, room = tokens + it.chunk, pairs + of_chunk, room - it.chunk
            budget_s -= times[1] * it.chunk + times[2] * of_chunk
            if is_cut:
                break
        request = after
    return tokens, pairs


@part
def fits(kind: int, tokens: int, fleet: Fleet, worker: Worker) -> bool:
    room: bool = worker.taken < fleet.max_running[kind] and worker.reserved + tokens <= fleet.kv_tokens[kind]
    return room


@part
def _begins(request: int, fleet: Fleet, worker: Worker, state: State) -> bool:
    it = state.requests[request]
    tokens = it.prompt + it.output if it.decodes_on == it.runs_on else it.prompt
    if not fits(worker.kind, tokens, fleet, worker):
        return False
    worker.reserved += tokens
    worker.taken += 1
    worker.ranked -= 1
    it.begun = 1
    return True


@part
def _budget_s(w: int, fleet: Fleet, state: State) -> Any:
    """What prompts may take of the next step."""
    worker, readers_s, queue_s = state.workers[w], 0.0, 0.0
    times, request = fleet.times[worker.kind], state.workers[w].first[PROMPTS]
    if worker.batch:
        readers_s = decode_seconds(0.0, times[4], times[5], worker.batch, worker.context)
        while request != NOBODY:
            queue_s += _work_s(request, times, state)
            request = state.requests[request].follower
    return _prompt_s(times[0], times[3], readers_s, worker.batch, queue_s, fleet.itl_s, fleet.ttft_s)


@part
def _work_s(request: int, times: Any, state: State) -> Any:
    it = state.requests[request]
    return times[1] * it.left + times[2] * pairs_of(it.prompt - it.left, it.left)
