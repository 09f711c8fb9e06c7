"""Forecasts of the arrivals: which one is believed, and that none sees what is not there."""

import numpy as np

from planner.policy.forecast import Forecast, observed

STEP_S, HORIZON_S = 5.0, 65.0


def followed(rates: list[float], seed: int | None = None) -> Forecast:
    dice = np.random.default_rng(seed)
    forecast = Forecast()
    for number, rate in enumerate(rates):
        seen = dice.poisson(rate * STEP_S) / STEP_S if seed is not None else rate
        forecast = observed(forecast, number * STEP_S, seen, STEP_S, HORIZON_S)
    return forecast


def test_a_constant_load_is_forecast_as_it_is_and_constant_wins_the_tie() -> None:
    forecast = followed([50.0] * 500)
    assert forecast.believed == "constant"
    assert abs(forecast.rate - 50) < 1e-6


def test_chance_does_not_move_the_level_much() -> None:
    for seed in range(5):
        assert abs(followed([50.0] * 300, seed).rate - 50) < 5


def test_a_long_ramp_is_seen_coming() -> None:
    forecast = followed([20 + 0.2 * number for number in range(400)], seed=1)
    assert forecast.believed != "constant"
    expected = 20 + 0.2 * (399 + HORIZON_S / STEP_S)
    assert forecast.level < 100 < forecast.rate < expected + 4


def test_a_step_is_a_new_level_at_once_and_no_trend() -> None:
    forecast = followed([20.0] * 200 + [80.0] * 2)
    assert forecast.level == 80
    assert forecast.rate == 80


def test_no_arrivals_are_a_rate_of_zero() -> None:
    assert followed([0.0] * 100).rate == 0
    assert followed([30.0] * 100 + [0.0] * 20).rate < 1e-3


def test_forecasts_that_are_waited_for_are_bounded() -> None:
    assert len(followed([10.0] * 200).due) <= HORIZON_S / STEP_S + 1
