"""Step times learned from workers: found again, robust, and careful where nothing is known."""

import numpy as np
import pytest

from planner.policy.step_model import StepModel, initial_model, learned
from runtime.config.step_times import StepTimes
from tests.planner.observations import decode_step, prompt_step

PROFILE = StepTimes()
SLOWER = 3.0


def taught(intervals: int, slower: float = SLOWER, noise: float = 0.03, outliers: float = 0.0) -> StepModel:
    dice = np.random.default_rng(0)
    model = initial_model(PROFILE)
    for _ in range(intervals):
        steps = []
        for _ in range(10):
            factor = slower * float(np.exp(dice.normal(0, noise))) * (8 if dice.random() < outliers else 1)
            sequences = float(dice.integers(5, 100))
            context = sequences * dice.normal(1000, 100)
            tokens = float(np.clip(dice.lognormal(6.5, 1), 1, 8192))
            steps.append(decode_step(sequences, context, factor * (5 + 0.02 * sequences + 4.2e-5 * context)))
            steps.append(prompt_step(tokens, factor * max(6, 0.02 * tokens + 0.6e-6 * tokens * tokens)))
        model = learned(model, steps, PROFILE)
    return model


def decode_ms(times: StepTimes, sequences: float, context: float) -> float:
    return times.decode_floor_ms + times.decode_sequence_ms * sequences + times.decode_token_ms * context


def prefill_ms(times: StepTimes, tokens: float) -> float:
    straight_ms = times.prefill_token_ms * tokens + times.prefill_pair_ms * tokens * tokens / 2
    return max(times.prefill_floor_ms, straight_ms)


@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_an_engine_of_another_speed_than_its_profile_is_found_out(outliers: float) -> None:
    times = taught(30, outliers=outliers).times
    for sequences in (1, 20, 100):
        expected = SLOWER * decode_ms(PROFILE, sequences, 1000 * sequences)
        assert decode_ms(times, sequences, 1000 * sequences) == pytest.approx(expected, rel=0.05)
    for tokens in (50, 1000, 6000):
        assert prefill_ms(times, tokens) == pytest.approx(SLOWER * prefill_ms(PROFILE, tokens), rel=0.05)


def test_a_few_samples_leave_the_profile_as_it_is() -> None:
    assert taught(1).times == PROFILE


def test_sequences_of_one_length_leave_the_rest_to_the_profile_at_the_measured_speed() -> None:
    """B and K rise together: which of them takes the time cannot be seen."""
    model = initial_model(PROFILE)
    for _ in range(10):
        steps = [decode_step(b, 1000 * b, 2 * decode_ms(PROFILE, b, 1000 * b)) for b in range(10, 30)]
        model = learned(model, steps, PROFILE)
    assert decode_ms(model.times, 100, 20_000) == pytest.approx(2 * decode_ms(PROFILE, 100, 20_000), rel=0.1)


def test_no_coefficient_is_ever_negative() -> None:
    model = initial_model(PROFILE)
    steps = [decode_step(b, 1000 * b, 20 - 0.1 * b) for b in range(1, 100)]  # faster with more: nonsense
    times = learned(learned(model, steps, PROFILE), steps, PROFILE).times
    assert min(times.decode_floor_ms, times.decode_sequence_ms, times.decode_token_ms) >= 0


def test_the_first_steps_of_a_new_worker_do_not_count() -> None:
    model = initial_model(PROFILE)
    assert learned(model, [decode_step(10, 1e4, 500, ready_for_s=29)] * 100, PROFILE) == model


def test_memory_is_bounded() -> None:
    model = taught(100)
    assert len(model.decode) == len(model.prefill) == 256
