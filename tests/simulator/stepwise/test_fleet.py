"""The fleet step by step against what can be reckoned by hand, and against the engine's own rules."""

import random
from collections import deque

import numpy as np
import pytest

from baton_proto.discovery import TimedStep
from benchmarks.planner.workload import chat_lengths, requests_of
from engine.blocks.block_manager import BlockManager
from engine.core import prefill_budget, scheduler
from engine.core.engine import Engine
from engine.core.timed_steps import TimedSteps
from engine.runners.mock_runner import MockRunner
from router.placement.weights import Weights
from runtime.config.overrides import with_overrides
from runtime.config.planner import TargetsConfig
from runtime.config.serving import ServingConfig
from runtime.config.step_times import StepTimes, token_pairs
from simulator.requests import NOBODY, Requests, alike
from simulator.stepwise import chunks
from simulator.stepwise.fleet import Layout, WorkerKind, fleet_of, simulate
from tests.engine.kv_oracle import make_sequence

TIMES = StepTimes()
KIND = WorkerKind(TIMES)
ONE = Layout(0, KIND, 1, KIND)
CONFIG = Weights()


def requests(*rows: tuple[float, int, int]) -> Requests:
    """(arrival s, prompt, output) each."""
    arrival_s, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    return alike(arrival_s.astype(float), prompt, prompt, output)


def prompt_ms(tokens: int, start: int = 0) -> float:
    return TIMES.prefill_ms(tokens, token_pairs(start, tokens))


def decodes_ms(context: int, steps: int) -> float:
    return sum(TIMES.decode_ms(1, context + step) for step in range(steps))


def test_steps_beside_answers_aim_at_what_the_engines_of_such_a_fleet_aim_at() -> None:
    for prefill in (0, 1):
        service = with_overrides(ServingConfig(), {"workers": {"prefill": prefill}})
        fleet = fleet_of(Layout(prefill, KIND, 1, KIND), CONFIG, service.planner.targets)
        assert (fleet.ttft_s, fleet.itl_s) == (service.step_targets.ttft_ms / 1e3, service.step_targets.itl_ms / 1e3)


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


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_prompt_beside_a_decode_begins_behind_the_steps_that_are_submitted_and_delays_the_next(ahead: int) -> None:
    layout = Layout(0, kind := WorkerKind(TIMES, ahead=ahead), 1, kind)
    answers = simulate(layout, requests((0.0, 100, 201), (0.1, 3000, 1)), CONFIG, TargetsConfig(itl_ms=100.0))
    first_ms = prompt_ms(100)
    step = next(n for n in range(200) if first_ms + decodes_ms(101, n) >= 100)  # the first that ends after the arrival
    step += ahead
    begins_ms = first_ms + decodes_ms(101, step)
    chunk_ms = prompt_ms(3000) + TIMES.beside_ms(1, 101 + step)
    assert answers.ttft_ms[1] == pytest.approx(begins_ms - 100 + chunk_ms)
    alone_ms = first_ms + decodes_ms(101, 200)
    assert answers.end_s[0] * 1e3 == pytest.approx(alone_ms + prompt_ms(3000) - TIMES.decode_floor_ms)


def behind(first: tuple[float, int, int], *rows: tuple[float, int, int, int, int]) -> Requests:
    """Behind the first one (arrival s, prompt, output, tokens that it lacks where the first one ran, and elsewhere)."""
    found = requests(first, *(row[:3] for row in rows))
    uncached, elsewhere = (np.array([first[1], *(row[column] for row in rows)]) for column in (3, 4))
    return found._replace(uncached=uncached, elsewhere=elsewhere, holder=np.array([NOBODY] + [0] * len(rows)))


def test_a_prefix_is_found_on_the_worker_that_computed_it() -> None:
    answers = simulate(Layout(0, KIND, 2, KIND), behind((0.0, 1000, 1), (1.0, 1100, 1, 100, 900)), CONFIG)
    assert answers.ttft_ms[1] == pytest.approx(prompt_ms(100, 1000))


def test_a_prefix_is_computed_again_elsewhere_while_its_worker_is_busy() -> None:
    given = behind((0.0, 1000, 1), (1.0, 8000, 1, 7000, 8000), (1.001, 1100, 1, 100, 600))
    answers = simulate(Layout(0, KIND, 2, KIND), given, CONFIG)
    assert answers.ttft_ms[1:] == pytest.approx([prompt_ms(7000, 1000), prompt_ms(600, 500)])


def test_a_shipped_prompt_is_found_by_both_of_its_workers() -> None:
    """Of the second one the prefill worker lacks 100 tokens, and its decode worker as many are sent."""
    config = Weights(local_prefill_tokens=0)
    answers = simulate(Layout(2, KIND, 2, KIND), behind((0.0, 1000, 50), (5.0, 1100, 1, 100, 900)), config)
    assert answers.ttft_ms[1] == pytest.approx(prompt_ms(100, 1000) + config.ship_ms + 100 * config.ship_token_ms)


def test_a_prompt_longer_than_a_step_runs_in_chunks() -> None:
    kind = WorkerKind(TIMES, max_batch_tokens=1024)
    answers = simulate(Layout(0, kind, 1, kind), requests((0.0, 2500, 1)), CONFIG)
    assert answers.ttft_ms[0] == pytest.approx(prompt_ms(1024) + prompt_ms(1024, 1024) + prompt_ms(452, 2048))


def test_a_request_waits_until_its_whole_answer_fits() -> None:
    for layout in (Layout(0, kind := WorkerKind(TIMES, kv_tokens=1000), 1, kind), Layout(1, KIND, 1, kind)):
        answers = simulate(layout, requests((0.0, 600, 200), (0.0, 600, 200)), CONFIG)
        assert answers.first_s[1] > answers.end_s[0]


def test_the_kernel_has_the_constants_of_the_engine() -> None:
    theirs = (scheduler.RANKED, scheduler.LOOK_AHEAD, prefill_budget.LEAST_TOKENS)
    assert theirs == (chunks.RANKED, chunks.LOOK_AHEAD, chunks.LEAST_TOKENS)


def engines_answers(given: Requests, kind: WorkerKind, targets: TargetsConfig) -> tuple[list[float], list[float]]:
    """When an engine with these requests has their first and their last tokens, in seconds."""
    runner = MockRunner(kind.times, 10_000, range(10), -1)
    engine = Engine(
        runner,
        BlockManager(kind.kv_tokens, 1),
        max_batch_tokens=kind.max_batch_tokens,
        max_running=kind.max_running,
        eos_token_ids=frozenset(),
        targets=targets,
        step_times=kind.times,
        clock=runner.clock,
    )
    rows = zip(given.arrival_s.tolist(), given.prompt.tolist(), given.output.tolist(), strict=True)
    coming, token, first_s, end_s = deque(enumerate(rows)), 100, [0.0] * len(given.prompt), [0.0] * len(given.prompt)
    engine.timed_steps = KnownTimes(kind.times)
    while coming or engine.has_work:
        if not engine.has_work:
            runner.now_s = max(runner.now_s, coming[0][1][0])
        while coming and coming[0][1][0] <= runner.now_s:
            number, (arrival_s, prompt, output) = coming.popleft()
            sequence = make_sequence(str(number), range(token, token + prompt), max_tokens=output, ignore_eos=True)
            token += prompt
            engine.add(sequence)
            sequence.due_s = arrival_s + targets.ttft_ms / 1e3  # it came while a step ran
        for news in engine.step().outputs:
            number = int(news.sequence.request_id)
            first_s[number] = first_s[number] or runner.now_s
            end_s[number] = runner.now_s
    return first_s, end_s


class KnownTimes(TimedSteps):
    """They need not be fitted."""

    knows_prompts = True

    def add(self, step: TimedStep, now_s: float) -> None:
        """Learns nothing."""


@pytest.mark.parametrize("seed", range(8))
def test_a_worker_takes_the_steps_that_the_engine_takes(seed: int) -> None:
    """Each case is a burst or a stream. Where memory is short, answers have one token, because the engine preempts."""
    dice = random.Random(seed)
    gap_s, target_ms = dice.choice((0.0, 0.02, 0.1)), dice.choice((15.0, 50.0))
    is_short = seed % 3 == 0
    kv_tokens, outputs = (9000, (1,)) if is_short else (400_000, (1, 30, 200))
    kind = WorkerKind(TIMES, kv_tokens=kv_tokens, max_batch_tokens=dice.choice((700, 8192)), ahead=MockRunner.depth)
    at_s, rows = 0.0, []
    for _ in range(dice.choice((30, 160))):
        rows.append((at_s, dice.choice((20, 200, 3000)) + dice.randrange(100), dice.choice(outputs)))
        at_s += dice.expovariate(1 / gap_s) if gap_s else 1e-9
    given, targets = requests(*rows), TargetsConfig(dice.choice((300.0, 3000.0)), target_ms)
    answers = simulate(Layout(0, kind, 1, kind), given, CONFIG, targets)
    first_s, end_s = engines_answers(given, kind, targets)
    assert answers.first_s == pytest.approx(first_s, rel=1e-6)
    assert answers.end_s == pytest.approx(end_s, rel=1e-6)


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
