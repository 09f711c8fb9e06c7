"""The fleet step by step against what can be reckoned by hand, and against the engine's own rules."""

import itertools
import random

import numpy as np
import pytest

from benchmarks.planner.workload import chat_lengths, requests_of
from engine.blocks.block_manager import BlockManager
from engine.core import prefill_budget, scheduler
from router.placement.weights import Weights
from runtime.config.step_times import StepTimes, token_pairs
from simulator.requests import Requests
from simulator.stepwise import chunks
from simulator.stepwise.fleet import Layout, WorkerKind, fleet_of, simulate
from simulator.stepwise.state import new_state
from tests.engine.kv_oracle import make_sequence

TIMES = StepTimes()
KIND = WorkerKind(TIMES)
ONE = Layout(0, KIND, 1, KIND)
CONFIG = Weights()


def requests(*rows: tuple[float, int, int]) -> Requests:
    """(arrival s, prompt, output) each."""
    arrival_s, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    return Requests(arrival_s.astype(float), prompt, prompt, output)


def prompt_ms(tokens: int, start: int = 0) -> float:
    return TIMES.prefill_ms(tokens, token_pairs(start, tokens))


def decodes_ms(context: int, steps: int) -> float:
    return sum(TIMES.decode_ms(1, context + step) for step in range(steps))


def test_one_request_takes_what_the_formulas_say() -> None:
    """A copy of the loop that numba kept on disk from before a change of the formulas fails here."""
    answers = simulate(ONE, requests((1.0, 1000, 101)), CONFIG)
    assert answers.ttft_ms[0] == pytest.approx(prompt_ms(1000))
    assert answers.itl_ms[0] == pytest.approx(decodes_ms(1001, 100) / 100)
    assert answers.gap_ms(0.5) == pytest.approx(5.0, rel=0.05)
    assert answers.events == 5  # arrival, prompt, first token, a run of decode steps, end


def test_a_shipped_prompt_costs_its_way() -> None:
    layout, config = Layout(1, KIND, 1, KIND), Weights(local_prefill_tokens=0)
    answers = simulate(layout, requests((0.0, 2000, 51)), config)
    assert answers.ttft_ms[0] == pytest.approx(prompt_ms(2000) + config.ship_ms + 2000 * config.ship_token_ms)
    assert answers.itl_ms[0] == pytest.approx(decodes_ms(2001, 50) / 50)


def test_a_prompt_beside_a_decode_begins_with_the_next_step_and_delays_it() -> None:
    answers = simulate(ONE, requests((0.0, 100, 201), (0.1, 3000, 1)), CONFIG)
    first_ms = prompt_ms(100)
    step = next(n for n in range(200) if first_ms + decodes_ms(101, n) >= 100)  # the first that ends after the arrival
    begins_ms = first_ms + decodes_ms(101, step)
    chunk_ms = prompt_ms(3000) + TIMES.decode_ms(1, 101 + step)
    assert answers.ttft_ms[1] == pytest.approx(begins_ms - 100 + chunk_ms)
    assert answers.end_s[0] * 1e3 == pytest.approx(first_ms + decodes_ms(101, 200) + prompt_ms(3000))


def test_a_prompt_longer_than_a_step_runs_in_chunks() -> None:
    kind = WorkerKind(TIMES, max_batch_tokens=1024)
    answers = simulate(Layout(0, kind, 1, kind), requests((0.0, 2500, 1)), CONFIG)
    assert answers.ttft_ms[0] == pytest.approx(prompt_ms(1024) + prompt_ms(1024, 1024) + prompt_ms(452, 2048))


def test_a_request_waits_until_its_whole_answer_fits() -> None:
    for layout in (Layout(0, kind := WorkerKind(TIMES, kv_tokens=1000), 1, kind), Layout(1, KIND, 1, kind)):
        answers = simulate(layout, requests((0.0, 600, 200), (0.0, 600, 200)), CONFIG)
        assert answers.first_s[1] > answers.end_s[0]


def test_a_step_is_shared_out_as_the_engine_does() -> None:
    assert prefill_budget.RIGHT_OF_FIRST == chunks.RIGHT_OF_FIRST
    assert prefill_budget.MUCH_SHORTER == chunks.MUCH_SHORTER
    assert scheduler.LOOK_AHEAD == chunks.LOOK_AHEAD
    dice = random.Random(0)
    for _ in range(300):
        left = [dice.randrange(1, 900) for _ in range(dice.randrange(1, 8))]
        budget = dice.randrange(1, 3000)
        state = new_state(fleet_of(ONE, CONFIG), requests(*((0.0, tokens, 1) for tokens in left)))
        state.begun["request"][0, : len(left)] = range(len(left))
        state.workers["prompts"][0] = len(left)
        tokens, pairs = chunks.share_out(0, budget, state)
        shares = prefill_budget.share_out(budget, left)
        assert state.begun["tokens"][0, : len(left)].tolist() == shares
        assert (tokens, pairs) == (sum(shares), sum(token_pairs(0, share) for share in shares))


def engines_ttft_ms(prompts: list[int], budget: int) -> list[float]:
    """When the engine's scheduler has computed prompts of which all but the first come during the first step."""
    took_ms, ends_ms = 0.0, [0.0] * len(prompts)
    waiting = scheduler.Scheduler(BlockManager(1024, 16), max_batch_tokens=budget, max_running=64)
    first = itertools.accumulate(prompts, initial=0)
    sequences = [
        make_sequence(str(i), range(at, at + n)) for i, (at, n) in enumerate(zip(first, prompts, strict=False))
    ]
    coming = iter(sequences)
    waiting.add(next(coming))
    while waiting.has_work:
        items = waiting.schedule().prefill
        pairs = sum(token_pairs(item.end - item.num_tokens, item.num_tokens) for item in items)
        took_ms += TIMES.prefill_ms(sum(item.num_tokens for item in items), pairs)
        for sequence in coming:
            waiting.add(sequence)
        for item in items:
            item.sequence.num_computed_tokens = item.end
            if item.sample:
                ends_ms[int(item.sequence.request_id)] = took_ms
                waiting.finish(item.sequence)
    return ends_ms


def test_prompts_begin_in_the_step_in_which_the_engine_begins_them() -> None:
    dice = random.Random(0)
    for _ in range(60):
        prompts = [dice.choice((20, 200, 2000)) + dice.randrange(100) for _ in range(dice.randrange(2, 14))]
        budget = dice.randrange(64, 1500)
        kind = WorkerKind(TIMES, max_batch_tokens=budget)
        rows = [(i * 1e-9, tokens, 1) for i, tokens in enumerate(prompts)]
        answers = simulate(Layout(0, kind, 1, kind), requests(*rows), CONFIG)
        assert answers.ttft_ms == pytest.approx(engines_ttft_ms(prompts, budget), rel=1e-6)


@pytest.mark.parametrize("layout", [Layout(0, KIND, 3, KIND), Layout(1, KIND, 2, KIND)])
def test_every_request_gets_all_its_tokens_under_overload_too(layout: Layout) -> None:
    small = WorkerKind(TIMES, kv_tokens=12_000, max_running=12, max_batch_tokens=512)
    layout = Layout(layout.prefill, small, layout.decode, small)
    many = requests_of(np.full(1, 120.0), chat_lengths, 0, bin_s=20.0)
    answers = simulate(layout, many, CONFIG)
    assert (answers.first_s > many.arrival_s).all()
    assert (answers.end_s >= answers.first_s).all()
    assert answers.gaps.sum() == (many.output - 1).sum()
    assert simulate(layout, many, CONFIG).end_s.tolist() == answers.end_s.tolist()
