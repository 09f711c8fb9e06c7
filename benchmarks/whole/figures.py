"""What a load on a system gave, and what loads of several seeds give together."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import sqrt

import numpy as np
from msgspec import Struct

from baton.bench.measured import Timing
from baton.bench.workload import TraceLine

TTFT_MS = (500.0, 1000.0, 2000.0, 4000.0)
ITL_MS = (15.0, 25.0, 50.0, 100.0)
TARGET = (2000.0, 50.0)  # TTFT, mean ITL
SHARE = 0.9  # of the requests that shall be in time where a rate counts as carried
FIGURES = ("TTFT mean", "TTFT p50", "TTFT p90", "TTFT p99", "ITL mean", "ITL p50", "ITL p99", "answer s")
"""ms, and for whole answers s. Smaller is better. ITL is over all gaps between events with text."""
# Quantiles 0.975 of Student's t for 2, 3, ... values.
T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)

Cell = tuple[str, float]
"""A trace and a rate in requests per second."""


class Run(Struct, frozen=True):
    """One system under one load."""

    system: str
    trace: str
    rate: float
    seed: int
    requests: int
    wrong: int  # answers that failed or had another length than asked for
    problem: str  # of the first of these
    seconds: float
    prompt_tokens: int
    output_tokens: int
    tokens_per_s: float  # of answers
    events_per_token: float
    figures: dict[str, float]
    in_time: list[list[float]]  # [TTFT_MS, ITL_MS] share of the requests

    @property
    def cell(self) -> Cell:
        return self.trace, self.rate


class Estimate(Struct, frozen=True):
    """A mean over seeds, and half of its 95 % interval (Student's t), which is nan for one seed."""

    mean: float
    plus_minus: float


def summed_up(system: str, cell: Cell, seed: int, lines: Sequence[TraceLine], timings: Sequence[Timing]) -> Run:
    """`timings`: in the order of `lines`."""
    problems = [_problem(line, timing) for line, timing in zip(lines, timings, strict=True)]
    whole = [timing for timing, problem in zip(timings, problems, strict=True) if not problem]
    times_s = [timing.tokens_s or [timing.ended_s] for timing in whole]  # a short answer may have no text
    first_ms = np.array([(times[0] - timing.sent_s) * 1e3 for times, timing in zip(times_s, whole, strict=True)])
    mean_ms = np.array(
        [
            (times[-1] - times[0]) * 1e3 / max(1, timing.output_tokens - 1)
            for times, timing in zip(times_s, whole, strict=True)
        ]
    )
    gaps_ms = np.array([gap * 1e3 for times in times_s for gap in np.diff(times)])
    answers_s = np.array([timing.ended_s - timing.sent_s for timing in whole])
    seconds = max(timing.ended_s for timing in timings) - min(timing.sent_s for timing in timings)
    tokens = sum(timing.output_tokens for timing in whole)
    return Run(
        system=system,
        trace=cell[0],
        rate=cell[1],
        seed=seed,
        requests=len(lines),
        wrong=len(lines) - len(whole),
        problem=next(filter(None, problems), ""),
        seconds=round(seconds, 3),
        prompt_tokens=sum(timing.prompt_tokens for timing in whole),
        output_tokens=tokens,
        tokens_per_s=round(tokens / seconds, 1),
        events_per_token=round(sum(len(timing.tokens_s) for timing in whole) / max(1, tokens), 3),
        figures=dict(zip(FIGURES, _figures(first_ms, gaps_ms, answers_s), strict=True)),
        in_time=[
            [float(((first_ms <= ttft) & (mean_ms <= itl)).sum()) / len(lines) for itl in ITL_MS] for ttft in TTFT_MS
        ],
    )


def _problem(line: TraceLine, timing: Timing) -> str:
    asked = max(1, line.output_length)
    if timing.problem:
        return timing.problem
    if timing.output_tokens != asked:
        return f"an answer of {timing.output_tokens} tokens, where {asked} were asked for"
    return ""


def _figures(first_ms: np.ndarray, gaps_ms: np.ndarray, answers_s: np.ndarray) -> list[float]:
    def spread(values: np.ndarray, shares: Sequence[int]) -> list[float]:
        if not len(values):
            return [0.0] * (1 + len(shares))
        return [round(float(value), 3) for value in (values.mean(), *np.percentile(values, shares))]

    return spread(first_ms, (50, 90, 99)) + spread(gaps_ms, (50, 99)) + spread(answers_s, ())


def estimate(values: Sequence[float]) -> Estimate:
    if len(values) < 2:
        return Estimate(float(values[0]), float("nan"))
    quantile = T[min(len(values) - 2, len(T) - 1)]
    return Estimate(float(np.mean(values)), float(quantile * np.std(values, ddof=1) / sqrt(len(values))))


def ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate:
    """Of figures by seed: of those seeds that both have, because these had the same requests."""
    seeds = sorted(ours.keys() & theirs.keys())
    return estimate([ours[seed] / max(theirs[seed], 1e-9) for seed in seeds])


def carried(shares: Mapping[float, float]) -> tuple[str, float]:
    """From the share in time by rate: the highest rate up to which SHARE is in time, between measured rates by a
    straight line. The sign is `<` below the lowest rate and `>=` at the highest."""
    rates = sorted(shares)
    if shares[rates[0]] < SHARE:
        return "<", rates[0]
    for low, high in pairwise(rates):
        if shares[high] < SHARE:
            return "", low + (high - low) * (shares[low] - SHARE) / (shares[low] - shares[high])
    return ">=", rates[-1]
