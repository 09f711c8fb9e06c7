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

DOUBLINGS = 12  # up or down from the rate asked for, in the search of what a layout carries
BISECTIONS = 5  # of a factor of 2, to 2 %
RESOLUTION = 0.02  # of the search


class Score(Struct, frozen=True):
    """One run. ITL is over all pairs of tokens; that of the targets is the mean of a request."""

    in_time: float  # share of the requests
    goodput: float  # requests/s
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    itl_mean_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    answer_mean_s: float  # from the request to the last token


@dataclass(frozen=True, slots=True)
class Standing:
    """A layout's results, one for each seed."""

    layout: Layout
    scores: list[Score]  # at the rate asked for
    carried: list[float]  # requests/s at which the targets' share of requests is in time; 0: at no rate

    def each(self, field: str) -> list[float]:
        return [getattr(score, field) for score in self.scores]

    def mean(self, field: str) -> float:
        return float(np.mean(self.each(field)))


class Comparison:
    """`gpus`: that goodput is divided by, whether a layout uses them all or not."""

    def __init__(self, traffic: Traffic, targets: TargetsConfig, placement: Weights, gpus: int, seeds: int) -> None:
        self.targets, self.gpus, self.seeds = targets, gpus, range(seeds)
        self._traffic, self._placement = traffic, placement

    def standing(self, layout: Layout, rate: float) -> Standing:
        scores = [self.score(layout, rate, seed) for seed in self.seeds]
        return Standing(layout, scores, [self._carried(layout, rate, seed) for seed in self.seeds])

    def score(self, layout: Layout, rate: float, seed: int) -> Score:
        requests = self._traffic.requests(rate, seed, layout.cache_tokens)
        answers = simulate(layout, requests, self._placement, self.targets)
        in_time = float(((answers.ttft_ms <= self.targets.ttft_ms) & (answers.itl_ms <= self.targets.itl_ms)).mean())
        p50_ms, p90_ms, p99_ms = np.percentile(answers.ttft_ms, (50, 90, 99)).tolist()
        gaps_s = float((answers.end_s - answers.first_s).sum())
        return Score(
            in_time=in_time,
            goodput=in_time * rate,
            ttft_mean_ms=float(answers.ttft_ms.mean()),
            ttft_p50_ms=p50_ms,
            ttft_p90_ms=p90_ms,
            ttft_p99_ms=p99_ms,
            itl_mean_ms=gaps_s * 1e3 / max(1, int((requests.output - 1).sum())),
            itl_p50_ms=answers.gap_ms(0.5),
            itl_p99_ms=answers.gap_ms(0.99),
            answer_mean_s=float((answers.end_s - requests.arrival_s).mean()),
        )

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
