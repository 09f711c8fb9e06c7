"""A simulated hour with a step up and a step down, and what went wrong with planners elsewhere."""

import numpy as np
import pytest

from benchmarks.planner.day import Outcome, Setting, reversals, simulate
from benchmarks.planner.fleet import Delays
from benchmarks.planner.serving import Hardware, Limits
from benchmarks.planner.workload import chat_lengths, requests_of
from planner.journal import Decided, Line
from runtime.config.planner import LimitsConfig, PlannerConfig, TargetsConfig
from runtime.config.step_times import StepTimes

HARDWARE = Hardware(StepTimes().faster(0.25))
START_S = 20.0
CONFIG = PlannerConfig(targets=TargetsConfig(1500, 60, 0.99), limits=LimitsConfig(gpu_budget=24), start_s=START_S)


def run(rates: list[float], begin: tuple[int, int]) -> tuple[Outcome, list[Decided]]:
    """Ten minutes at each rate."""
    requests = requests_of(np.array(rates), chat_lengths, 0)
    setting = Setting(HARDWARE, Limits(1.5, 0.06), Delays(START_S), 24, 600.0 * len(rates), begin)
    lines: list[Line] = []
    outcome = simulate(requests, setting, CONFIG, 0, lines.append)
    return outcome, [line for line in lines if isinstance(line, Decided)]


def test_an_hour_with_a_fourfold_step_up_and_down_again() -> None:
    outcome, decisions = run([15, 15, 60, 60, 15, 15], (3, 4))
    assert outcome.attainment > 0.98  # the rest waited while workers started
    assert outcome.gpu_hours < 11.5  # what the step needs, for the whole hour, would be 18
    assert outcome.most_gpus <= 24
    assert outcome.actions < 50
    late = [d.observation for d in decisions if 1200 + START_S + 15 < d.observation.time_s < 1800]
    assert all(seen.interval.ttft_p90_ms is None or seen.interval.ttft_p90_ms <= 1500 for seen in late)
    last = decisions[-1].target
    first = next(d.target for d in decisions if d.observation.time_s >= 1190)
    assert last.prefill <= first.prefill + 1
    assert last.decode <= first.decode + 1


@pytest.mark.parametrize("rate", [4.0, 8.0, 9.5])
def test_a_steady_load_near_the_border_of_two_sizes_does_not_oscillate(rate: float) -> None:
    outcome, decisions = run([rate] * 3, (2, 2))
    settled = [d for d in decisions if d.observation.time_s > 600]
    assert sum(len(d.target.actions) for d in settled) <= 4
    assert outcome.reversals == 0


def test_a_night_without_requests_is_left_with_the_least() -> None:
    _, decisions = run([20, 0, 0], (4, 4))
    assert (decisions[-1].target.prefill, decisions[-1].target.decode) == (1, 1)
    assert len(decisions[-1].observation.workers) == 2


def test_the_same_seed_gives_the_same_hour() -> None:
    assert run([20, 30], (4, 4))[0] == run([20, 30], (4, 4))[0]


def test_reversals_are_actions_that_undo_one_before() -> None:
    assert reversals([(0, "drain", "prefill"), (50, "add", "prefill"), (51, "add", "prefill")], 60) == 1
    assert reversals([(0, "drain", "prefill"), (61, "add", "prefill")], 60) == 0
    assert reversals([(0, "drain", "prefill"), (5, "add", "decode")], 60) == 0
    assert reversals([(0, "add", "prefill"), (5, "flip", "decode")], 60) == 1
