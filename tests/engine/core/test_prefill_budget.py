"""How prompts share a step."""

from math import inf

import pytest

from engine.core.prefill_budget import Prompt, StepBudget, follows
from runtime.config.planner import TargetsConfig
from runtime.config.step_times import StepTimes

TIMES = StepTimes(
    prefill_floor_ms=6.0,
    prefill_token_ms=0.02,
    prefill_pair_ms=1e-6,
    decode_floor_ms=6.0,
    decode_sequence_ms=0.1,
    decode_token_ms=4e-5,
)


def budget() -> StepBudget:
    made = StepBudget(TargetsConfig(ttft_ms=1000.0, itl_ms=50.0))
    made.times = TIMES
    return made


def test_what_prompts_may_take_keeps_a_step_within_the_target_of_its_readers() -> None:
    assert budget().prompt_ms(16, 100_000, 600.0) + TIMES.beside_ms(16, 100_000) == pytest.approx(50.0)
    assert budget().prompt_ms(16, 100_000, 1800.0) + TIMES.beside_ms(16, 100_000) == pytest.approx(150.0), "a queue"
    assert budget().prompt_ms(1, 6_000, 600.0) + TIMES.beside_ms(1, 6_000) == pytest.approx(200.0), "one reader"


def test_steps_last_by_new_targets_once_there_are_some() -> None:
    made = budget()
    made.targets = TargetsConfig(ttft_ms=1000.0, itl_ms=25.0)
    assert made.step_tokens == budget().step_tokens / 2


def test_prompts_have_half_of_a_step_when_decoding_alone_misses_the_target() -> None:
    assert budget().prompt_ms(200, 2_000_000, 0.0) >= 6.0 + TIMES.beside_ms(200, 2_000_000)


def test_little_work_goes_first_and_what_is_due_sooner_before_its_like() -> None:
    def rank(left: int, due_ms: float) -> float:
        return made.rank(made.work_ms(Prompt(0, left, due_ms)), due_ms)

    made = budget()
    assert rank(100, 1000.0) < rank(8000, 1000.0)
    assert rank(8000, 100.0) < rank(8000, 1000.0)
    assert rank(100, inf) == rank(100, 1000.0)


@pytest.mark.parametrize(
    ("left", "led", "leader_left", "step_tokens", "waits"),
    [
        (2064, 2000, 2064, 8192, True),
        (2064, 128, 2064, 8192, False),  # a step takes as long
        (2064, 129, 2064, 8192, True),
        (60, 20, 60, 64, True),  # steps are small
        (60, 16, 60, 64, False),
        (2064, 2000, 4127, 8192, True),
        (2064, 2000, 4128, 8192, False),  # it goes first
    ],
)
def test_a_prompt_waits_for_a_leader_of_similar_length_that_computes_more_than_a_steps_worth(
    left: int, led: int, leader_left: int, step_tokens: int, waits: bool
) -> None:
    assert follows(left, led, leader_left, step_tokens) is waits
