"""Step times fitted to timed steps, for the planner and for each worker that a router knows.

The formulas are those of step_times.py. A fit has two steps:

1. The engine's slowdown against the profile is the median of the samples' ratios.
2. The coefficients minimise the squared relative error (a short step counts as much as a long one). No coefficient is
   negative, and outliers weigh less (Huber). Because B and K usually rise and fall together, the samples alone may not
   determine the coefficients; the profile, at the measured speed, therefore joins as PRIOR samples.
"""

from collections import deque
from collections.abc import Iterable
from itertools import combinations
from typing import Final

import numpy as np
import numpy.ma
from msgspec.structs import astuple
from numpy.typing import NDArray

from baton_proto.discovery import TimedStep
from baton_proto.planner import StepSample
from runtime.config.step_times import StepTimes

Vector = NDArray[np.float64]

ENOUGH = 20  # samples before the fit replaces the profile
PRIOR = 5.0  # number of samples that the profile counts as
ROUNDS = 3  # of weighing and solving
HUBER = 1.5  # multiple of the median error beyond which a sample counts less
QUICKEST = 0.05  # of all samples: what is quicker may have been timed wrongly
UNDER_FLOOR = 0.7  # prompts expected to take less than this share of the floor measure the floor

WINDOW: Final = 128  # steps kept of each kind
REFIT_AFTER: Final = 16  # new steps
RECENT: Final = 16  # steps of a kind
CHANGED: Final = 1.3

# Points [n, pairs] and [1, B, K] at which the profile joins the fit.
PREFILL_POINTS = np.array([[256, 32e3], [2048, 2.1e6], [2048, 14.7e6], [8192, 33.6e6]])
DECODE_POINTS = np.array([[1, 1, 1e3], [1, 32, 8e3], [1, 32, 64e3], [1, 128, 64e3], [1, 128, 256e3]])


def prefill_rows(steps: Iterable[StepSample | TimedStep]) -> list[list[float]]:
    """[n, pairs, ms] of each step that only ran prompts."""
    return [
        [step.prompt_tokens, step.prompt_pairs, step.step_ms]
        for step in steps
        if step.prompt_tokens > 0 and not step.sequences and step.step_ms > 0
    ]


def decode_rows(steps: Iterable[StepSample | TimedStep]) -> list[list[float]]:
    """[1, B, K, ms] of each step that only decoded."""
    return [
        [1.0, step.sequences, step.context_tokens, step.step_ms]
        for step in steps
        if step.sequences > 0 and not step.prompt_tokens and step.step_ms > 0
    ]


def fitted(
    prefill: list[list[float]], decode: list[list[float]], profile: StepTimes, known: StepTimes | None = None
) -> StepTimes:
    """Step times fitted to rows as `prefill_rows` and `decode_rows` make them. A kind with fewer than ENOUGH rows keeps
    the profile's values. `known`: of a fit to mostly the same rows, from which one more round goes on."""
    prefill_times, decode_times = profile.prefill, profile.decode
    starts = (None, None) if known is None else (np.array(known.prefill), np.array(known.decode))
    if len(prefill) >= ENOUGH:
        prefill_times = _fitted_prefill(np.array(prefill), np.array(prefill_times), starts[0])
    if len(decode) >= ENOUGH:
        decode_times = _fitted_decode(np.array(decode), np.array(decode_times), starts[1])
    return StepTimes(*prefill_times, *decode_times)


class FittedSteps:
    """The times of one worker's steps, fitted to the last ones. When the last RECENT steps of a kind take CHANGED times
    as long as expected, or as short, the worker has changed: the earlier ones are forgotten, and until ENOUGH new ones
    are there, the coefficients are those from before, so many times. In a step that does both, prompts took what the
    decodes beside them did not take by the model."""

    __slots__ = ("_decode", "_is_known", "_new", "_prefill", "_profile", "times")

    def __init__(self, profile: StepTimes) -> None:
        self._prefill: deque[list[float]] = deque(maxlen=WINDOW)  # rows as `fitted` has them
        self._decode: deque[list[float]] = deque(maxlen=WINDOW)
        self._new = 0
        self._is_known = False  # `times` are of a fit to mostly the same rows
        self._profile = self.times = profile

    def add(self, step: TimedStep) -> None:
        if step.prompt_tokens:
            beside_ms = self.times.beside_ms(step.sequences, step.context_tokens)
            if step.step_ms > beside_ms:
                self._prefill.append([step.prompt_tokens, step.prompt_pairs, step.step_ms - beside_ms])
        elif step.sequences and step.step_ms > 0:
            self._decode.append([1.0, step.sequences, step.context_tokens, step.step_ms])
        self._new += 1

    def refit(self) -> bool:
        """Returns whether there were enough new steps."""
        if self._new < REFIT_AFTER or not any(self.seen):
            return False
        self._new = 0
        self._notice_change()
        self.times = fitted(
            list(self._prefill), list(self._decode), self._profile, self.times if self._is_known else None
        )
        self._is_known = max(len(self._prefill), len(self._decode)) >= ENOUGH
        return True

    @property
    def seen(self) -> tuple[bool, bool]:
        """Whether its steps with prompts and its decodes are enough to say anything."""
        return len(self._prefill) >= RECENT, len(self._decode) >= RECENT

    def expect(self, usual: StepTimes) -> None:
        """It is expected to take as long as is usual for what it has not shown."""
        self._profile, self.times = self._shown(self._profile, usual), self._shown(self.times, usual)

    def shown(self, otherwise: StepTimes) -> StepTimes:
        """Its times for the kinds of steps that it has shown."""
        return self._shown(self.times, otherwise)

    def _shown(self, own: StepTimes, otherwise: StepTimes) -> StepTimes:
        prefill, decode = self.seen
        return StepTimes(*(own if prefill else otherwise).prefill, *(own if decode else otherwise).decode)

    def _notice_change(self) -> None:
        """Keeps of each kind what has come since the worker became faster or slower."""
        slower = [1.0, 1.0]
        for kind, rows in enumerate((self._prefill, self._decode)):
            found = ratios(list(rows)[-RECENT:], self.times)
            ratio = float(np.median(found)) if len(found) == RECENT else 1.0
            if not 1 / CHANGED < ratio < CHANGED:
                slower[kind] = ratio
                for _ in range(len(rows) - RECENT):
                    rows.popleft()
        if slower != [1.0, 1.0]:
            scaled = [ms * slower[place // 3] for place, ms in enumerate(astuple(self.times))]
            self._profile, self._is_known = StepTimes(*scaled), False


def errors(prefill: list[list[float]], decode: list[list[float]], times: StepTimes) -> tuple[Vector, Vector]:
    """The relative errors of `times`: [prefill rows] and [decode rows]."""
    return np.abs(1 / ratios(prefill, times) - 1), np.abs(1 / ratios(decode, times) - 1)


def ratios(rows: list[list[float]], times: StepTimes) -> Vector:
    """The durations of steps of one kind as multiples of what `times` predicts: [rows]."""
    if not rows:
        return np.empty(0)
    x = np.array(rows)
    prompts = x.shape[1] == 3
    expected = np.maximum(times.prefill_floor_ms, x[:, :2] @ times.prefill[1:]) if prompts else x[:, :3] @ times.decode
    found: Vector = x[:, -1] / np.maximum(expected, 1e-9)
    return found


def _fitted_prefill(rows: Vector, profile: Vector, known: Vector | None) -> tuple[float, float, float]:
    """`rows` [samples, 3]; `profile` and `known`: floor, per token, per pair."""
    x, y = rows[:, :2], rows[:, 2]
    profile = profile * _slower(y, np.maximum(profile[0], x @ profile[1:]))
    start = profile if known is None else known
    floor_ms, straight = start[0], start[1:]
    quickest_ms = float(np.quantile(y, QUICKEST))  # no step takes less than the floor
    for _ in range(ROUNDS if known is None else 1):
        expected = x @ straight
        short, long = expected < UNDER_FLOOR * floor_ms, expected >= floor_ms
        floor_ms = float(np.median(y[short])) if short.sum() >= ENOUGH // 4 else min(profile[0], quickest_ms)
        straight = _fitted(x[long], y[long], profile[1:], straight, PREFILL_POINTS)
    return float(floor_ms), float(straight[0]), float(straight[1])


def _fitted_decode(rows: Vector, profile: Vector, known: Vector | None) -> tuple[float, float, float]:
    """`rows` [samples, 4]; `profile` and `known`: floor, per sequence, per token of context."""
    x, y = rows[:, :3], rows[:, 3]
    profile = profile * _slower(y, x @ profile)
    found = profile if known is None else known
    for _ in range(ROUNDS if known is None else 1):
        found = _fitted(x, y, profile, found, DECODE_POINTS)
    return float(found[0]), float(found[1]), float(found[2])


def _slower(y: Vector, expected: Vector) -> float:
    known = expected > 0
    return float(np.median(y[known] / expected[known])) if known.any() else 1.0


def _fitted(x: Vector, y: Vector, profile: Vector, coefficients: Vector, points: Vector) -> Vector:
    """One round: weighs the samples by the errors of `coefficients`, and returns the best ones for these weights."""
    relative = x / y[:, None]
    errors = np.abs(relative @ coefficients - 1)
    typical = max(1e-3, float(np.median(errors))) if len(errors) else 1.0
    weights = np.minimum(1.0, HUBER * typical / np.maximum(errors, 1e-9))
    squares, products = (relative * weights[:, None]).T @ relative, weights @ relative
    expected = points @ profile
    at_points = points[expected > 0] / expected[expected > 0, None]
    share = PRIOR / len(points)
    return _non_negative(squares + share * at_points.T @ at_points, products + share * at_points.sum(axis=0))


def _non_negative(squares: Vector, products: Vector) -> Vector:
    """The x >= 0 that minimises x^T squares x / 2 - products x. Exact: each of the at most seven sets of positive
    coefficients is tried. Because K is a million times 1, columns are scaled first."""
    scale = np.sqrt(np.maximum(np.diag(squares), 1e-300))
    squares = squares / np.outer(scale, scale) + 1e-9 * np.eye(len(scale))
    products = products / scale
    size = len(products)
    best, best_value = np.zeros(size), 0.0
    free = np.linalg.solve(squares, products)
    if (free >= 0).all():
        return free / scale
    for count in range(1, size):
        for some in combinations(range(size), count):
            chosen = np.array(some)
            found = np.linalg.solve(squares[np.ix_(chosen, chosen)], products[chosen])
            value = float(-found @ products[chosen])  # twice the minimum
            if (found >= 0).all() and value < best_value - 1e-12:
                best, best_value = np.zeros(size), value
                best[chosen] = found
    return best / scale
