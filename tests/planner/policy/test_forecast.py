"""Forecasts of the arrivals: which one is believed, and that none sees what is not there."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st
from msgspec.structs import replace

from planner.policy.forecast import Due, Forecast, Series, constant, holt, kalman, observed

STEP_S, HORIZON_S = 5.0, 65.0


def followed(rates: list[float], seed: int | None = None) -> Forecast:
    dice = np.random.default_rng(seed)
    forecast = Forecast()
    for number, rate in enumerate(rates):
        seen = dice.poisson(rate * STEP_S) / STEP_S if seed is not None else rate
        forecast = observed(forecast, number * STEP_S, seen, STEP_S, HORIZON_S)
    return forecast


def test_a_long_ramp_is_seen_coming() -> None:
    forecast = followed([20 + 0.2 * number for number in range(400)], seed=1)
    assert forecast.believed != "constant"
    expected = 20 + 0.2 * (399 + HORIZON_S / STEP_S)
    assert forecast.level < 100 < forecast.rate < expected + 4


def test_a_step_is_a_new_level_at_once_and_no_trend() -> None:
    forecast = followed([20.0] * 200 + [80.0] * 2)
    assert forecast.level == 80
    assert forecast.rate == 80


def test_a_count_beyond_four_deviations_is_a_jump_and_one_of_four_is_not() -> None:
    """Of 4 arrivals per second, one second shows 4 +- 2."""
    keep = math.exp(-1 / 20)
    assert constant(Series(level=4.0), 12.0, 1.0).level == pytest.approx(12 - 8 * keep)
    assert constant(Series(level=4.0), 12.01, 1.0).level == 12.01
    at_bound, beyond = holt(Series(level=4.0), 12.0, 1.0), holt(Series(level=4.0), 12.01, 1.0)
    assert at_bound.level == pytest.approx(12 - 8 * keep)
    assert at_bound.trend > 0
    assert (beyond.level, beyond.trend) == (12.01, 0.0)


def test_a_rate_near_zero_is_judged_as_one_arrival_per_interval() -> None:
    """Of 5 s without arrivals the rate may as well be 0.2 +- 0.2."""
    assert constant(Series(), 0.8, 5.0).level == pytest.approx(0.8 * (1 - math.exp(-5 / 20)))
    assert constant(Series(), 0.81, 5.0).level == 0.81
    assert constant(Series(level=0.2), 1.0, 5.0).level < 1.0
    assert constant(Series(level=3.2), 4 * math.sqrt(3.2 / 5.0) + 3.3, 5.0).level == 4 * math.sqrt(3.2 / 5.0) + 3.3


levels = st.floats(0, 200)
trends = st.floats(-2, 2)
durations = st.floats(0.5, 20)


@given(levels, trends, st.floats(-3.9, 3.9), durations)
def test_holt_smooths_level_and_trend(level: float, trend: float, surprise: float, duration_s: float) -> None:
    """Holt's equations, in the form of the textbook."""
    forecast = level + trend * duration_s
    rate = forecast + surprise * math.sqrt(max(forecast, 1 / duration_s) / duration_s)
    state = Series(level=level, trend=trend, error=0.5, scored=7.0)
    alpha, beta = 1 - math.exp(-duration_s / 20), 1 - math.exp(-duration_s / 180)
    after = holt(state, rate, duration_s)
    assume(forecast >= 0)
    assert after.level == pytest.approx(alpha * rate + (1 - alpha) * forecast, abs=1e-9)
    slope = (after.level - level) / duration_s
    assert after.trend == pytest.approx(beta * slope + (1 - beta) * trend, abs=1e-9)
    assert (after.error, after.scored) == (0.5, 7.0)


def test_a_trend_does_not_lead_holts_level_below_zero() -> None:
    after = holt(Series(level=1.0, trend=-0.25), 0.0, 5.0)
    assert after.level == 0.0
    assert after.trend == pytest.approx(-0.25 + (1 - math.exp(-5 / 180)) * (-1 / 5 + 0.25))


@given(levels, trends, st.floats(0, 400), durations, st.floats(0, 9), st.floats(-0.9, 0.9), st.floats(0, 0.01))
def test_kalman_is_the_filter_of_a_local_linear_trend(
    level: float, trend: float, rate: float, duration_s: float, variance: float, correlation: float, bend: float
) -> None:
    """The equations written out, without matrices."""
    covariance = correlation * math.sqrt(variance * bend)
    after = kalman(Series(level, trend, variance, covariance, bend, 0.5, 7.0), rate, duration_s)
    square = max(level, 1 / duration_s) ** 2
    p11 = variance + 2 * duration_s * covariance + duration_s**2 * bend + 3e-4 * square * duration_s
    p12 = covariance + duration_s * bend
    p22 = bend + 2e-8 * square * duration_s
    expected = max(0.0, level + trend * duration_s)
    noise = max(expected, 1 / duration_s) / duration_s
    error = rate - expected
    assume(abs(error**2 / (16 * (p11 + noise)) - 1) > 1e-9)
    if error**2 > 16 * (p11 + noise):
        p11, p12 = p11 + error**2, 0.0
    gain, trend_gain = p11 / (p11 + noise), p12 / (p11 + noise)
    assert after.level == pytest.approx(max(0.0, expected + gain * error), abs=1e-9)
    assert after.trend == pytest.approx(trend + trend_gain * error, abs=1e-9)
    assert after.variance == pytest.approx(p11 * (1 - gain), rel=1e-6, abs=1e-9)
    assert after.covariance == pytest.approx(p12 * (1 - gain), rel=1e-6, abs=1e-9)
    assert after.trend_variance == pytest.approx(p22 - trend_gain * p12, rel=1e-6, abs=1e-12)
    assert (after.error, after.scored) == (0.5, 7.0)


def test_a_surprise_of_exactly_four_deviations_is_no_step_to_kalman() -> None:
    """Four deviations of 3: of the level's variance 5 and the count's 4."""
    state = Series(level=4.0, variance=5 - 3e-4 * 16)
    assert kalman(state, 16.0, 1.0).variance == pytest.approx(5 * 4 / 9)
    assert kalman(state, 16.1, 1.0).variance > 3.5


def scored(**errors: float) -> Forecast:
    """Of a load of 10/s that `holt` and `kalman` see growing."""
    trends = {"constant": 0.0, "holt": 0.1, "kalman": 0.2}
    return Forecast({n: Series(10.0, trends[n], error=errors.get(n, 9.0), scored=300.0) for n in trends})


@pytest.mark.parametrize(
    ("errors", "believed"),
    [
        ({"constant": 1.0, "holt": 0.96, "kalman": 0.97}, "constant"),
        ({"constant": 2.0, "holt": 1.9, "kalman": 1.9}, "constant"),
        ({"constant": 2.0, "holt": 1.89}, "holt"),
        ({"constant": 2.0, "kalman": 1.89}, "kalman"),
        ({"constant": 2.0, "holt": 1.0, "kalman": 1.5}, "holt"),
        ({"constant": 2.0, "holt": 1.5, "kalman": 1.0}, "kalman"),
        ({"constant": 2.0, "holt": 1.5, "kalman": 1.5}, "holt"),
    ],
)
def test_the_least_recent_error_is_believed_if_it_is_five_percent_below_that_of_constant(
    errors: dict[str, float], believed: str
) -> None:
    after = observed(scored(**errors), 0.0, 10.0, STEP_S, HORIZON_S)
    assert after.believed == believed
    of = after.series[believed]
    assert after.rate == pytest.approx(of.level + of.trend * 120 * (1 - math.exp(-HORIZON_S / 120)))
    assert after.level == after.series["constant"].level


def test_who_was_scored_for_less_than_five_minutes_is_not_believed() -> None:
    before = scored(constant=2.0, holt=1.0)
    young = before.series | {"holt": replace(before.series["holt"], scored=299.0)}
    assert observed(Forecast(young), 0.0, 10.0, STEP_S, HORIZON_S).believed == "constant"
    waited = Forecast(young, [Due(0.0, [10.0, 10.0, 10.0])])
    assert observed(waited, 0.0, 10.0, 1.0, HORIZON_S).believed == "holt"


def test_each_forecast_that_came_due_is_compared_with_what_came() -> None:
    due = [Due(90.0, [12.0, 10.0, 7.0]), Due(100.0, [10.0, 9.0, 11.0]), Due(100.1, [99.0, 99.0, 99.0])]
    before = replace(scored(constant=4.0, holt=5.0, kalman=6.0), due=due)
    after = observed(before, 100.0, 10.0, STEP_S, HORIZON_S)
    keep = math.exp(-STEP_S / 900)
    for name, first, second, error in (("constant", 2, 0, 4.0), ("holt", 0, 1, 5.0), ("kalman", 3, 1, 6.0)):
        expected = keep * (keep * error + (1 - keep) * first) + (1 - keep) * second
        assert after.series[name].error == pytest.approx(expected)
        assert after.series[name].scored == 300 + 2 * STEP_S
    assert after.due[0] == due[2]
    assert [entry.due_s for entry in after.due] == [100.1, 165.0]
    fades_s = 120 * (1 - math.exp(-HORIZON_S / 120))
    assert after.due[1].rates == pytest.approx([s.level + s.trend * fades_s for s in after.series.values()])


def test_the_first_interval_is_the_level_of_all_forecasters() -> None:
    after = observed(Forecast(), 0.0, 30.0, STEP_S, HORIZON_S)
    assert {series.level for series in after.series.values()} == {30.0}
    assert after.due == [Due(HORIZON_S, [30.0, 30.0, 30.0])]


def test_no_trend_is_forecast_below_zero() -> None:
    falling = {name: Series(1.0, -1.0) for name in ("constant", "holt", "kalman")}
    after = observed(Forecast(falling), 0.0, 1.0, STEP_S, HORIZON_S)
    assert after.rate == 0.0
    assert after.due[0].rates == [0.0, 0.0, 0.0]
