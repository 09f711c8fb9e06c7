"""What a comparison means: which layout to take, and from which rate on splitting pays.

Differences are taken seed by seed, because every layout has the same requests. A difference is noise when zero lies
within the 95 % interval of its mean (Student's t).
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Literal

import numpy as np
from msgspec import Struct

from simulator.advice.comparison import RESOLUTION, Comparison, Standing

Ahead = Literal["mixed", "split", "neither"]

# Quantiles 0.975 of Student's t for 2, 3, ... values.
T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09)
LEAST_SEEDS, MOST_SEEDS = 2, len(T) + 1
NEGLIGIBLE = 0.002  # share of a value that nobody would change a layout for
CURVE_RATES = 12
FINALISTS = 4  # splits that the curve is drawn for


class Difference(Struct, frozen=True):
    mean: float
    plus_minus: float  # half of the 95 % interval
    is_noise: bool


class Point(Struct, frozen=True):
    """Goodput in requests/s, means over the seeds: the best mixed layout, the best split, and how much more the split
    has."""

    rate: float
    mixed: float
    split: float
    gain: Difference


class Range(Struct, frozen=True):
    """Neighbouring rates of the curve at which the same side is ahead; `neither`: the difference is noise."""

    ahead: Ahead
    from_rate: float
    to_rate: float
    by: float  # share of the better side's goodput, at most


def plus_minus(values: Sequence[float]) -> float:
    """Half of the 95 % interval of their mean."""
    return float(T[len(values) - 2] * np.std(values, ddof=1) / np.sqrt(len(values)))


def difference(ones: Sequence[float], others: Sequence[float], resolution: float = NEGLIGIBLE) -> Difference:
    """ones - others, seed by seed. `resolution`: share of the values below which nothing is known."""
    gaps = np.array(ones) - np.array(others)
    mean, spread = float(gaps.mean()), plus_minus(gaps.tolist())
    least = resolution * max(float(np.mean(ones)), float(np.mean(others)))
    return Difference(mean, spread, abs(mean) <= max(spread, least))


def goodputs(standing: Standing) -> list[float]:
    return [score.goodput for score in standing.scores]


def recommended(standings: Sequence[Standing]) -> list[Standing]:
    """The layouts that nothing here is better than, the recommended one first: the most goodput, then the highest rate
    carried, and among equals mixed workers, which need no transfer of KV. `standings`: mixed ones first."""
    best = max(standings, key=lambda one: sum(goodputs(one)))
    equal = [one for one in standings if difference(goodputs(best), goodputs(one)).is_noise]
    best = max(equal, key=lambda one: sum(one.carried))
    return [one for one in equal if difference(best.carried, one.carried, RESOLUTION).is_noise]


def best_of_each(standings: Sequence[Standing]) -> list[Standing]:
    """The mixed layout and the split that carry most, as far as there are any."""
    groups = ([one for one in standings if bool(one.layout.prefill) is split] for split in (False, True))
    return [max(group, key=lambda one: sum(one.carried)) for group in groups if group]


def curve(comparison: Comparison, standings: Sequence[Standing]) -> list[Point]:
    """Goodput from far below up to what the layouts carry at most. Empty without splits, or when no rate is carried."""
    mixed = [one for one in standings if not one.layout.prefill]
    splits = sorted((one for one in standings if one.layout.prefill), key=lambda one: sum(one.carried), reverse=True)
    most = max(max(one.carried) for one in standings)
    if not mixed or not splits or not most:
        return []
    points = []
    for rate in np.geomspace(most / 4, most, CURVE_RATES).tolist():
        best = []
        for group in (mixed, splits[:FINALISTS]):
            runs = [[comparison.score(one.layout, rate, seed).goodput for seed in comparison.seeds] for one in group]
            best.append(max(runs, key=sum))
        points.append(Point(rate, float(np.mean(best[0])), float(np.mean(best[1])), difference(best[1], best[0])))
    return points


def ranges(points: Sequence[Point]) -> list[Range]:
    """Who is ahead, from the lowest rate to the highest. The break-even is where a range begins."""
    found = []
    for ahead, group in groupby(points, key=_ahead):
        members = list(group)
        gains = [abs(point.gain.mean) / max(point.mixed, point.split, 1e-9) for point in members]
        found.append(Range(ahead, members[0].rate, members[-1].rate, max(gains)))
    return found


def _ahead(point: Point) -> Ahead:
    if point.gain.is_noise:
        return "neither"
    return "split" if point.gain.mean > 0 else "mixed"
