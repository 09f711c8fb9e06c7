"""Step times learned from workers: found again, robust, and careful where nothing is known."""

import math
from itertools import product

import numpy as np
import pytest

from baton_proto.planner import StepSample
from planner.policy.step_model import StepModel, initial_model, learned
from runtime.config.step_fit import (
    DECODE_POINTS,
    PREFILL_POINTS,
    Vector,
    decode_rows,
    errors,
    fitted,
    prefill_rows,
)
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


def test_a_fit_goes_on_from_the_one_before_and_finds_what_a_whole_one_finds() -> None:
    """Also when the engine becomes three times as slow in between: once its new steps have replaced the old ones."""
    before, after = taught(30, slower=1.0), taught(30)
    times = before.times
    for new in range(16, 257, 16):
        rows = before.prefill[new:] + after.prefill[:new], before.decode[new:] + after.decode[:new]
        times = fitted(*rows, PROFILE, times)
    for sequences, tokens in ((1, 50), (20, 1000), (100, 6000)):
        assert decode_ms(times, sequences, 1000 * sequences) == pytest.approx(
            decode_ms(after.times, sequences, 1000 * sequences), rel=0.02
        )
        assert prefill_ms(times, tokens) == pytest.approx(prefill_ms(after.times, tokens), rel=0.02)


def test_a_worker_is_warm_after_thirty_seconds() -> None:
    fresh = initial_model(PROFILE)
    assert learned(fresh, [decode_step(10, 1e4, 500, ready_for_s=29)] * 100, PROFILE) == fresh
    model = learned(fresh, [decode_step(10, 1e4, 500, ready_for_s=30)], PROFILE)
    assert model.decode == [[1.0, 10, 1e4, 500]]
    assert model.prefill == []
    assert learned(model, [], PROFILE) is model
    assert learned(model, [prompt_step(100, 7)], PROFILE).prefill == [[100, 5000, 7]]


def mixed_step(tokens: float, sequences: float, step_ms: float) -> StepSample:
    return StepSample("decode-0", 1e3, tokens, tokens * tokens / 2, sequences, 1000 * sequences, step_ms)


def test_steps_of_both_kinds_and_steps_that_took_no_time_are_left_out() -> None:
    steps = [mixed_step(1, 0, 6), mixed_step(0, 1, 5), mixed_step(1, 1, 9), mixed_step(0, 0, 9)]
    steps += [mixed_step(1, 0, 0), mixed_step(0, 1, 0), mixed_step(2, 0, 0.5), mixed_step(0, 2, 0.5)]
    assert prefill_rows(steps) == [[1, 0.5, 6], [2, 2, 0.5]]
    assert decode_rows(steps) == [[1.0, 1, 1000, 5], [1.0, 2, 2000, 0.5]]


@pytest.mark.parametrize(("count", "every"), [(16, 1), (17, 2), (32, 2), (33, 3)])
def test_of_many_steps_at_once_at_most_sixteen_of_each_kind_are_kept(count: int, every: int) -> None:
    steps = [prompt_step(100 + number, 9) for number in range(count)]
    steps += [decode_step(100 + number, 0, 9) for number in range(count)]
    model = learned(initial_model(PROFILE), steps, PROFILE)
    kept = [100 + number for number in range(0, count, every)]
    assert [row[0] for row in model.prefill] == kept
    assert [row[1] for row in model.decode] == kept


def test_the_newest_samples_are_kept() -> None:
    model = initial_model(PROFILE)
    for number in range(300):
        model = learned(model, [prompt_step(100 + number, 9), decode_step(1 + number, 0, 9)], PROFILE)
    assert [row[0] for row in model.prefill] == [100 + number for number in range(44, 300)]
    assert [row[1] for row in model.decode] == [1 + number for number in range(44, 300)]


def test_twenty_samples_of_a_kind_are_enough_for_this_kind() -> None:
    rows = [[1000.0 + number, 5e5, 100.0] for number in range(20)]
    steps = [[1.0, 10.0 + number, 1e4, 50.0] for number in range(20)]
    assert fitted(rows[1:], steps[1:], PROFILE) == PROFILE
    prompts, answers = fitted(rows, steps[1:], PROFILE), fitted(rows[1:], steps, PROFILE)
    assert prompts.prefill != PROFILE.prefill
    assert prompts.decode == PROFILE.decode
    assert answers.prefill == PROFILE.prefill
    assert answers.decode != PROFILE.decode


def test_errors_are_relative_and_of_each_kind() -> None:
    of_prompts, of_answers = errors(
        [[100, 0, 6.0], [1000, 0, 10.0], [1000, 1e7, 64.0]], [[1, 10, 1000, 5.242], [1, 10, 1000, 10.484]], PROFILE
    )
    assert of_prompts == pytest.approx([0, 1.0, 0.5])
    assert of_answers == pytest.approx([0, 0.5])
    of_short, _ = errors([[10, 0, 1.0]], [], StepTimes(prefill_floor_ms=0.25, prefill_token_ms=0.01))
    assert of_short == pytest.approx([0.75])
    nothing = errors([], [], PROFILE)
    assert [len(of) for of in nothing] == [0, 0]


def least_squares(rows: Vector, y: Vector) -> Vector:
    """The best coefficients of which none is negative, by trying which of them are zero."""
    best, least = np.zeros(rows.shape[1]), float(y @ y)
    for positive in product([False, True], repeat=rows.shape[1]):
        some = np.flatnonzero(positive)
        found = np.zeros(rows.shape[1])
        found[some] = np.linalg.lstsq(rows[:, some], y, rcond=None)[0]
        rest = float(np.sum((rows @ found - y) ** 2))
        if (found >= 0).all() and rest < least:
            best, least = found, rest
    return best


def oracle(x: Vector, y: Vector, profile: Vector, start: Vector, points: Vector) -> Vector:
    """One round of the fit: relative errors, Huber's weights, five samples' worth of the profile."""
    size = np.abs(x @ start / y - 1)
    weight = np.minimum(1.0, 1.5 * max(1e-3, float(np.median(size))) / np.maximum(size, 1e-9)) if len(y) else size
    points = points[points @ profile > 0]
    at = points @ profile
    samples, prior = (
        x / y[:, None] * np.sqrt(weight)[:, None],
        points / at[:, None] * math.sqrt(5 / max(1, len(points))),
    )
    scale = np.array([1.0, 1e2, 1e5])[-x.shape[1] :]
    ones = np.concatenate([np.sqrt(weight), np.full(len(points), math.sqrt(5 / max(1, len(points))))])
    return least_squares(np.concatenate([samples, prior]) / scale, ones) / scale


@pytest.mark.parametrize("seed", range(6))
def test_decode_coefficients_are_the_best_of_three_rounds_of_weighing(seed: int) -> None:
    dice = np.random.default_rng(seed)
    count = (20, 50)[seed % 2]
    sequences, outliers = dice.integers(1, 100, count).astype(float), np.where(dice.random(count) < 0.1, 5.0, 1.0)
    x = np.stack([np.ones(count), sequences, sequences * dice.normal(1000, 300, count)], axis=1)
    y = x @ [(9, 0.1, 1e-4), (40, 0, 1e-4), (0.5, 0.5, 0)][seed % 3] * np.exp(dice.normal(0, 0.1, count)) * outliers
    profile = np.array(PROFILE.decode)
    profile = profile * float(np.median(y / (x @ profile)))
    expected = profile
    for _ in range(3):
        expected = oracle(x, y, profile, expected, DECODE_POINTS)
    found = fitted([], [[*row, ms] for row, ms in zip(x.tolist(), y.tolist(), strict=True)], PROFILE)
    assert found.decode == pytest.approx(expected, rel=1e-3, abs=1e-9)
    assert found.prefill == PROFILE.prefill


@pytest.mark.parametrize("seed", range(8))
def test_prefill_coefficients_are_the_best_of_three_rounds_and_short_prompts_measure_the_floor(seed: int) -> None:
    dice = np.random.default_rng(seed)
    count = (25, 60)[seed % 2]
    tokens = np.clip(dice.lognormal((6.5, 4.0, 8.0, 6.5)[seed % 4], 1.2, count), 1, 8192).round()
    x = np.stack([tokens, tokens**2 * dice.uniform(0.5, 3, count)], axis=1)
    outliers = np.where(dice.random(count) < 0.1, 5.0, 1.0)
    y = np.maximum(20.0, x @ np.array([0.03, 3e-6])) * np.exp(dice.normal(0, 0.05, count)) * outliers
    whole = np.array(PROFILE.prefill)
    whole = whole * float(np.median(y / np.maximum(whole[0], x @ whole[1:])))
    floor, straight = whole[0], whole[1:]
    for _ in range(3):
        short, long = x @ straight < 0.7 * floor, x @ straight > floor
        floor = float(np.median(y[short])) if short.sum() >= 5 else whole[0]
        straight = oracle(x[long], y[long], whole[1:], straight, PREFILL_POINTS)
    found = fitted([[*row, ms] for row, ms in zip(x.tolist(), y.tolist(), strict=True)], [], PROFILE)
    assert found.prefill == pytest.approx([floor, *straight], rel=1e-3, abs=1e-9)
    assert found.decode == PROFILE.decode


@pytest.mark.parametrize("seed", range(4))
def test_a_fit_that_goes_on_from_another_is_one_round_from_its_coefficients(seed: int) -> None:
    dice = np.random.default_rng(seed)
    known = StepTimes(12.0, 0.07, 1e-6, 12.0, 0.01, 1e-4)
    tokens = np.clip(dice.lognormal(5.5, 1.2, 60), 1, 8192).round()
    x, sequences = np.stack([tokens, tokens**2 / 2], axis=1), dice.integers(1, 100, 60).astype(float)
    steps = np.stack([np.ones(60), sequences, sequences * dice.normal(1000, 300, 60)], axis=1)
    prompts_ms, steps_ms = np.maximum(20.0, x @ np.array([0.03, 3e-6])), steps @ np.array([9.0, 0.1, 1e-4])
    for times_ms in (prompts_ms, steps_ms):
        times_ms *= np.exp(dice.normal(0, 0.1, 60)) * np.where(dice.random(60) < 0.1, 5.0, 1.0)
    found = fitted(
        np.column_stack([x, prompts_ms]).tolist(), np.column_stack([steps, steps_ms]).tolist(), PROFILE, known
    )
    whole, straight = np.array(PROFILE.prefill), np.array(known.prefill[1:])
    whole = whole * float(np.median(prompts_ms / np.maximum(whole[0], x @ whole[1:])))
    short, long = x @ straight < 0.7 * known.prefill_floor_ms, x @ straight >= known.prefill_floor_ms
    floor = float(np.median(prompts_ms[short]))
    expected = oracle(x[long], prompts_ms[long], whole[1:], straight, PREFILL_POINTS)
    assert found.prefill == pytest.approx([floor, *expected], rel=1e-3, abs=1e-9)
    profile = np.array(PROFILE.decode)
    profile = profile * float(np.median(steps_ms / (steps @ profile)))
    expected = oracle(steps, steps_ms, profile, np.array(known.decode), DECODE_POINTS)
    assert found.decode == pytest.approx(expected, rel=1e-3, abs=1e-9)


def test_prompts_that_all_take_the_floor_leave_the_rest_to_the_profile_at_their_speed() -> None:
    found = fitted([[10.0, 50.0, 18.0]] * 20, [], PROFILE)
    assert found.prefill == pytest.approx([18.0, 0.06, 3.6e-6], rel=1e-3)


def test_five_short_prompts_measure_the_floor_and_four_do_not() -> None:
    long = [[2000.0, 2e6, 42.4]] * 20
    assert fitted([*long, *[[10.0, 50.0, 9.0]] * 4], [], PROFILE).prefill_floor_ms == pytest.approx(6.0)
    assert fitted([*long, *[[10.0, 50.0, 9.0]] * 5], [], PROFILE).prefill_floor_ms == pytest.approx(9.0)


def test_a_profile_without_times_is_learned_from_samples_alone() -> None:
    nothing = StepTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    steps = [[1.0, float(b), 2e4 * (b % 5 + 1), 7 + 0.1 * b + 2 * (b % 5 + 1)] for b in range(1, 21)]
    assert fitted([], steps, nothing).decode == pytest.approx([7.0, 0.1, 1e-4], rel=1e-3)
    prompts = [[100.0 * n, 5e3 * n * n, 8 * n + 5e-3 * n * n] for n in range(1, 61)]
    assert fitted(prompts, [], nothing).prefill == pytest.approx([0.0, 0.08, 1e-6], rel=1e-3)


@pytest.mark.parametrize(
    ("sequence_ms", "token_ms"), [(-0.2, -1e-4), (0.01, -1e-4), (-0.2, 2e-5), (0.01, 2e-5)]
)  # of the truth, of which no fit is negative
def test_a_coefficient_that_would_be_negative_is_zero_and_the_others_are_the_best_without_it(
    sequence_ms: float, token_ms: float
) -> None:
    x = np.array([[1.0, float(b), 1e4 * (7 * b % 11)] for b in range(1, 21)])
    y = x @ np.array([20.0, sequence_ms, token_ms])
    expected = np.zeros(3)
    for _ in range(3):
        expected = oracle(x, y, np.zeros(3), expected, DECODE_POINTS)
    found = fitted([], np.column_stack([x, y]).tolist(), StepTimes(6.0, 0.02, 1.2e-6, 0.0, 0.0, 0.0)).decode
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-9)
    assert [ms > 0 for ms in found] == [True, sequence_ms > 0, token_ms > 0]


def test_the_unit_of_time_makes_no_difference() -> None:
    def of(unit: float, profile: StepTimes = PROFILE) -> StepTimes:
        steps = [[1.0, float(b), 500.0 * b, unit * (7 + 0.1 * b)] for b in range(1, 21)]
        prompts = [[100.0 * n, 5e3 * n * n, unit * (6 + 2 * n)] for n in range(1, 21)]
        return fitted(prompts, steps, profile)

    once, slow = of(1.0), of(1e9)
    fast = of(1e-6, StepTimes(*(1e-6 * ms for ms in (*PROFILE.prefill, *PROFILE.decode))))
    for found, unit in ((slow, 1e9), (fast, 1e-6)):
        assert found.prefill == pytest.approx([unit * ms for ms in once.prefill], rel=1e-6, abs=0)
        assert found.decode == pytest.approx([unit * ms for ms in once.decode], rel=1e-6, abs=0)
