"""Which prompts a step computes and how much of each, by the engine's rules (prefill_budget.py, scheduler.py)."""

from typing import Any

from simulator.compiled import pairs_of, part
from simulator.stepwise.state import DECODES, MOST_PROMPTS, NOBODY, WAITING, Fleet, State, Worker, take_out

# As in engine/core; a test compares them.
RIGHT_OF_FIRST, MUCH_SHORTER, LOOK_AHEAD = 4, 2, 8


@part
def start_prompts(w: int, budget: int, fleet: Fleet, state: State) -> None:
    """Begins the waiting prompts whose turn comes in this step, and those that slip in before their turn."""
    worker, begun, before, request = state.workers[w], state.begun[w], NOBODY, state.workers[w].first[WAITING]
    for _ in range(LOOK_AHEAD):
        if request == NOBODY or worker.prompts == MOST_PROMPTS:
            return
        it = state.requests[request]
        after, place, earlier = it.follower, 0, 0
        while place < worker.prompts and begun[place].request < request:
            earlier += state.requests[begun[place].request].left
            place += 1
        if earlier < budget or it.left * MUCH_SHORTER <= state.requests[begun[0].request].left:
            tokens = it.prompt + it.output if worker.kind == DECODES else it.prompt
            if not fits(worker.kind, tokens, fleet, worker):
                return
            worker.reserved += tokens
            worker.taken += 1
            for other in range(worker.prompts, place, -1):
                begun[other].request = begun[other - 1].request
            begun[place].request = request
            worker.prompts += 1
            take_out(worker, WAITING, request, before, state)
        else:
            before = request
        request = after


@part
def share_out(w: int, budget: int, state: State) -> Any:
    """Gives each begun prompt its chunk: the first one a quarter by right, the rest where least is left. Returns the
    tokens and pairs of the chunks."""
    count, begun, requests, tokens, pairs = state.workers[w].prompts, state.begun[w], state.requests, 0, 0.0
    if count == 0:
        return tokens, pairs
    for i in range(count):
        begun[i].tokens = 0
    begun[0].tokens = min(requests[begun[0].request].left, -(-budget // RIGHT_OF_FIRST))
    budget -= begun[0].tokens
    while budget > 0:
        shortest, least = NOBODY, 0
        for i in range(count):
            left = requests[begun[i].request].left
            if begun[i].tokens < left and (shortest == NOBODY or left < least):
                shortest, least = i, left
        if shortest == NOBODY:
            break
        more = min(least - begun[shortest].tokens, budget)
        begun[shortest].tokens += more
        budget -= more
    for i in range(count):
        it = requests[begun[i].request]
        tokens += begun[i].tokens
        pairs += pairs_of(it.prompt - it.left, begun[i].tokens)
    return tokens, pairs


@part
def fits(kind: int, tokens: int, fleet: Fleet, worker: Worker) -> bool:
    room: bool = worker.taken < fleet.max_running[kind] and worker.reserved + tokens <= fleet.kv_tokens[kind]
    return room
