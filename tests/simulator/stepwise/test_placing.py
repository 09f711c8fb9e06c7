"""The placement of the fast simulation against the router's own, on random loads of equal workers."""

import random

import numpy as np
import pytest

from router.placement.candidates import NO_CANDIDATES, Candidates, Request
from router.placement.cost import KEPT
from router.placement.placement import Weighing, weigh
from router.placement.weights import Weights
from router.workers.account import NO_LIMIT
from runtime.config.step_times import StepTimes, token_pairs
from simulator.requests import NOBODY, alike
from simulator.stepwise.fleet import Layout, WorkerKind, fleet_of
from simulator.stepwise.placing import SCANNED, Prompt, note_load, placed
from simulator.stepwise.state import DECODES, PREFILLS, Fleet, State, new_state

BLOCK = 16
KIND = WorkerKind(StepTimes())
CONFIG = Weights()
NOW_US = 5_000_000
NO_REQUESTS = alike(np.zeros(0), *(np.zeros(0, np.int64) for _ in range(3)))


def random_state(layout: Layout, dice: random.Random, busy: float) -> tuple[Fleet, State]:
    fleet = fleet_of(layout, CONFIG)
    state = new_state(fleet, NO_REQUESTS)
    for w, worker in enumerate(state.workers):
        if dice.random() < busy:
            worker["queue_tokens"] = dice.randrange(1, 20) * BLOCK * 10
            worker["queue_pairs"] = int(token_pairs(0, int(worker["queue_tokens"])))
            worker["queue_s"] = NOW_US / 1e6 - dice.randrange(1000) / 1e6
        if dice.random() < (0.3 if worker["kind"] == PREFILLS else 1.0 if worker["queue_tokens"] else 0.8):
            worker["requests"] = dice.randrange(1, 60)
            worker["charged"] = worker["queue_tokens"] + dice.randrange(2000) * BLOCK
        note_load(w, fleet, state)
    return fleet, state


def random_prompt(workers: tuple[int, int], dice: random.Random, elsewhere: float) -> Prompt:
    """One in three without a holder; all workers hold at most the share `elsewhere` of it."""
    blocks, (prefill, decode) = dice.randrange(1, 500), workers
    shared = int(dice.random() * elsewhere * blocks)
    tokens, left = blocks * BLOCK, (blocks - shared) * BLOCK
    if dice.random() < 1 / 3:
        return Prompt(tokens, left, left, NOBODY, NOBODY)
    decoded_on = dice.randrange(prefill + decode)
    was_shipped = decoded_on >= prefill > 0 and dice.random() < 0.5
    computed_on = dice.randrange(prefill) if was_shipped else decoded_on
    return Prompt(tokens, dice.randint(1, blocks - shared) * BLOCK, left, computed_on, decoded_on)


def candidates(prompt: Prompt, state: State, kind: int) -> Candidates:
    numbers = np.flatnonzero(state.workers["kind"] == kind)
    rows = state.workers[numbers]
    if not len(rows):
        return NO_CANDIDATES
    left = [prompt.uncached if w in (prompt.computed_on, prompt.decoded_on) else prompt.elsewhere for w in numbers]
    cached = np.array([(prompt.tokens - tokens) // BLOCK for tokens in left], np.int32)
    blocks = rows["charged"] // BLOCK
    load = [rows["requests"], rows["queue_tokens"], blocks, rows["queue_pairs"], np.round(rows["queue_s"] * 1e6)]
    load += [np.full(len(rows), NO_LIMIT), *np.zeros((3, len(rows)))]
    times = np.tile([list(KIND.times.prefill + KIND.times.decode)], (len(rows), 1))
    keys = tuple((f"{kind}-{number}", 1) for number in range(len(rows)))
    columns = np.ascontiguousarray(np.array(load).T.astype(np.int64))
    return Candidates(keys, cached, columns, times, now_us=NOW_US)


def weighed(prompt: Prompt, state: State) -> Weighing:
    decode, prefill = candidates(prompt, state, DECODES), candidates(prompt, state, 1 - DECODES)
    return weigh(Request(prompt.tokens, BLOCK), decode, prefill, CONFIG, random.Random(0))


@pytest.mark.parametrize("workers", [2, 8, 100])
@pytest.mark.parametrize("busy", [0.3, 0.9, 1.0])
def test_mixed_workers_are_chosen_as_the_router_chooses(workers: int, busy: float) -> None:
    dice, found = random.Random(f"{workers} {busy}"), 0
    for _ in range(100):
        fleet, state = random_state(Layout(0, KIND, workers, KIND), dice, busy)
        prompt = random_prompt((0, workers), dice, elsewhere=0.0)
        costs = weighed(prompt, state).decode.costs()
        chosen, same = placed(prompt, NOW_US / 1e6, fleet, state)
        assert chosen == same
        # Of more, the shortest queue is not sought, which matters where one holds more than the others.
        exact = 1e-6 if workers <= SCANNED or prompt.decoded_on == NOBODY else 0.1
        assert costs[chosen].total == pytest.approx(min(cost.total for cost in costs), rel=exact)
        found += chosen == prompt.decoded_on
    assert 10 < found < 67, "both the holder and others are chosen"


@pytest.mark.parametrize("workers", [(4, 12), (1, 1), (1, 7)])
@pytest.mark.parametrize("busy", [0.3, 0.9, 1.0])
def test_prefill_and_decode_workers_are_chosen_as_the_router_chooses(workers: tuple[int, int], busy: float) -> None:
    dice = random.Random(f"{workers} {busy}")
    prefill, decode = workers
    for _ in range(200):
        fleet, state = random_state(Layout(prefill, KIND, decode, KIND), dice, busy)
        prompt = random_prompt(workers, dice, elsewhere=0.7)
        theirs = weighed(prompt, state)
        runs, decodes = placed(prompt, NOW_US / 1e6, fleet, state)
        costs, shippers = theirs.decode.costs(), theirs.prefill.costs()
        each = theirs.prefill.costs(KEPT) + costs
        assert each[decodes].total == pytest.approx(min(cost.total for cost in each), rel=1e-6)
        assert each[decodes].runs_prompt == (runs == decodes)
        if runs != decodes:
            assert shippers[runs].total == pytest.approx(min(cost.total for cost in shippers), rel=1e-6)
