"""Layouts on the same requests: what each gives at the rate that is asked for, and what rate it carries.

Goodput: requests per second whose TTFT and mean ITL meet the targets.
"""

from dataclasses import dataclass

import numpy as np
from msgspec import Struct

from router.placement.weights import Weights
from runtime.config.planner import TargetsConfig
from simulator.advice.traffic import Traffic
from simulator.stepwise.fleet import Layout, simulate

WARM_UP = 0.1  # share of the requests, from the first on, that do not count
DOUBLINGS = 12  # up or down from the rate asked for, in the search of what a layout carries
BISECTIONS = 5  # of a factor of 2, to 2 %
RESOLUTION = 0.02  # of the search


class Score(Struct, frozen=True):
    """One run. ITL is over all pairs of tokens; that of the targets is the mean of a request."""

    in_time: float  # share of the requests
    goodput: float  # requests/s
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float


@dataclass(frozen=True, slots=True)
class Standing:
    """A layout's results, one for each seed."""

    layout: Layout
    scores: list[Score]  # at the rate asked for
    carried: list[float]  # requests/s at which the targets' share of requests is in time; 0: at no rate

    def mean(self, field: str) -> float:
        return float(np.mean([getattr(score, field) for score in self.scores]))


class Comparison:
    """`gpus`: that goodput is divided by, whether a layout uses them all or not."""

    def __init__(self, traffic: Traffic, targets: TargetsConfig, placement: Weights, gpus: int, seeds: int) -> None:
        self.targets, self.gpus, self.seeds = targets, gpus, range(seeds)
        self._traffic, self._placement = traffic, placement

    def standing(self, layout: Layout, rate: float) -> Standing:
        scores = [self.score(layout, rate, seed) for seed in self.seeds]
        return Standing(layout, scores, [self._carried(layout, rate, seed) for seed in self.seeds])

    def score(self, layout: Layout, rate: float, seed: int) -> Score:
        requests = self._traffic.requests(rate, seed)
        answers = simulate(layout, requests, self._placement)
        counted = slice(int(WARM_UP * len(requests.arrival_s)), None)
        ttft_ms = answers.ttft_ms[counted]
        met = (ttft_ms <= self.targets.ttft_ms) & (answers.itl_ms[counted] <= self.targets.itl_ms)
        in_time = float(met.mean())
        p50_ms, p99_ms = (float(value) for value in np.percentile(ttft_ms, (50, 99)))
        return Score(in_time, in_time * rate, p50_ms, p99_ms, answers.gap_ms(0.5), answers.gap_ms(0.99))

    def _carried(self, layout: Layout, rate: float, seed: int) -> float:
        def carries(rate: float) -> bool:
            return self.score(layout, rate, seed).in_time >= self.targets.attainment

        up = carries(rate)
        for _ in range(DOUBLINGS):
            following = rate * 2 if up else rate / 2
            if carries(following) != up:
                low, high = sorted((rate, following))
                break
            rate = following
        else:
            return rate if up else 0.0
        for _ in range(BISECTIONS):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if carries(middle) else (low, middle)
        return float(low)
