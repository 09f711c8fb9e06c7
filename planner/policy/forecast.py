"""A forecast of the arrival rate at the moment at which a worker that is started now will be ready.

Three forecasters run side by side on the arrivals per second of each interval: `constant` (the rate stays as it is),
`holt` (level and damped trend) and `kalman` (simdkalman's filter, with gains from the noise of Poisson arrivals). Each
forecast is compared with the rate observed when it comes due. The forecaster with the least recent error is believed.
Because a wrong trend costs more than a missed one, `constant` is believed unless another's error is 5 % smaller. A
forecaster is a function from state to state; its state is part of the policy's memory.
"""

import math
from collections.abc import Callable

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from simdkalman import primitives

LEVEL_S = 20.0  # time constant of the level
TREND_S = 180.0  # of the trend
DAMPING_S = 120.0  # how long a trend lasts
SCORE_S = 900.0  # time constant of the error that compares forecasters
BETTER = 0.95  # share of constant's error below which another is believed
JUMP = 4.0  # standard deviations of a Poisson count beyond which the rate has jumped
WALK = 3e-4  # Kalman: variance that the level gains per second, as a share of its square
BEND = 2e-8  # Kalman: variance that the trend gains per second, as a share of the level's square, per s^2

_LEVEL = np.array([[1.0, 0.0]])  # the observed rate is the level


class Series(Struct, frozen=True):
    """One forecaster's state: level [1/s], trend [1/s^2] and, of `kalman`, their covariance; and its score."""

    level: float = 0.0
    trend: float = 0.0
    variance: float = 0.0
    covariance: float = 0.0
    trend_variance: float = 0.0
    error: float = 0.0  # mean absolute error of recent forecasts, 1/s
    scored: float = 0.0  # seconds of intervals with forecasts that came due


class Due(Struct, frozen=True, array_like=True):
    due_s: float
    rates: list[float]  # of each forecaster


class Forecast(Struct, frozen=True):
    series: dict[str, Series] = {}
    due: list[Due] = []
    believed: str = "constant"
    rate: float = 0.0  # expected after the horizon, 1/s
    level: float = 0.0  # now, 1/s


Step = Callable[[Series, float, float], Series]  # state, arrivals per second of the interval, its seconds


def constant(state: Series, rate: float, duration_s: float) -> Series:
    return replace(state, level=_followed(state.level, rate, duration_s))


def holt(state: Series, rate: float, duration_s: float) -> Series:
    """Exponential smoothing of level and trend (Holt, 1957)."""
    expected = state.level + state.trend * duration_s
    level = _followed(max(0.0, expected), rate, duration_s)
    gain = 1 - math.exp(-duration_s / TREND_S)
    if abs(rate - expected) > JUMP * _deviation(expected, duration_s):
        return replace(state, level=level)  # a step says nothing of the trend
    return replace(state, level=level, trend=state.trend + gain * ((level - state.level) / duration_s - state.trend))


def kalman(state: Series, rate: float, duration_s: float) -> Series:
    """Local linear trend (Harvey, 1989); the noise of a measurement is that of a Poisson count."""
    square = max(state.level, 1 / duration_s) ** 2
    moves = np.array([[1.0, duration_s], [0.0, 1.0]])
    walks = np.diag([WALK, BEND]) * square * duration_s
    spread = np.array([[state.variance, state.covariance], [state.covariance, state.trend_variance]])
    mean, spread = primitives.predict(np.array([state.level, state.trend]), spread, moves, walks)
    level = max(0.0, float(mean[0, 0]))
    noise = np.array([[_deviation(level, duration_s) ** 2]])
    if (rate - level) ** 2 > JUMP**2 * (spread[0, 0] + noise[0, 0]):
        # A step: the level becomes uncertain, the trend stays.
        spread = np.diag([spread[0, 0] + (rate - level) ** 2, spread[1, 1]])
    mean, spread = primitives.update(np.array([level, state.trend]), spread, _LEVEL, noise, np.array([rate]))
    return replace(
        state,
        level=max(0.0, float(mean[0, 0])),
        trend=float(mean[1, 0]),
        variance=float(spread[0, 0]),
        covariance=float(spread[0, 1]),
        trend_variance=float(spread[1, 1]),
    )


FORECASTERS: dict[str, Step] = {"constant": constant, "holt": holt, "kalman": kalman}


def observed(forecast: Forecast, time_s: float, rate: float, duration_s: float, horizon_s: float) -> Forecast:
    """The forecast after an interval of `duration_s` that ends at `time_s` and had `rate` arrivals per second."""
    series = {name: forecast.series.get(name, Series(level=rate)) for name in FORECASTERS}
    due = [entry for entry in forecast.due if entry.due_s > time_s]
    for entry in forecast.due[: len(forecast.due) - len(due)]:
        keep = math.exp(-duration_s / SCORE_S)
        for (name, state), expected in zip(series.items(), entry.rates, strict=True):
            error = keep * state.error + (1 - keep) * abs(expected - rate)
            series[name] = replace(state, error=error, scored=state.scored + duration_s)
    series = {name: step(series[name], rate, duration_s) for name, step in FORECASTERS.items()}
    rates = [_ahead(state, horizon_s) for state in series.values()]
    believed = "constant"
    for name, state in series.items():
        if state.scored >= SCORE_S / 3 and state.error < BETTER * series["constant"].error:
            believed = name if state.error < series[believed].error else believed
    chosen = _ahead(series[believed], horizon_s)
    due.append(Due(time_s + horizon_s, rates))
    return Forecast(series, due, believed, chosen, series["constant"].level)


def _ahead(state: Series, horizon_s: float) -> float:
    """The rate after the horizon. A trend fades: it counts for DAMPING_S * (1 - exp(-horizon / DAMPING_S)) seconds."""
    return max(0.0, state.level + state.trend * DAMPING_S * (1 - math.exp(-horizon_s / DAMPING_S)))


def _followed(level: float, rate: float, duration_s: float) -> float:
    """The smoothed level; the rate itself when it is more than JUMP standard deviations away."""
    if abs(rate - level) > JUMP * _deviation(level, duration_s):
        return rate
    return level + (1 - math.exp(-duration_s / LEVEL_S)) * (rate - level)


def _deviation(rate: float, duration_s: float) -> float:
    """Standard deviation of the rate that an interval shows when arrivals are Poisson."""
    return math.sqrt(max(rate, 1 / duration_s) / duration_s)
