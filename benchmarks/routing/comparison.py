"""Calls both halves in turns, checks that their answers are equal, and makes rows of their times."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.routing.half import Half

ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Goal:
    """The least ratio to the peer's figure, or the largest figure of ours; both when both are given."""

    ratio: float | None = None
    at_most: float | None = None

    def met(self, ratio: float | None, value: float) -> bool:
        """A ratio that was not measured fails no goal."""
        if self.ratio is not None and ratio is not None and ratio < self.ratio:
            return False
        return self.at_most is None or value <= self.at_most

    def __str__(self) -> str:
        parts = [] if self.ratio is None else [f">= {self.ratio:g}x"]
        return ", ".join(parts + ([] if self.at_most is None else [f"<= {self.at_most:g}"]))


@dataclass(frozen=True, slots=True)
class Row:
    case: str
    what: str
    unit: str
    ours: float
    theirs: float | None  # None: the peer has no counterpart
    ratio: float | None  # how many times better ours is
    goal: Goal | None
    details: dict[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.goal.met(self.ratio, self.ours)


class AnswersDifferError(Exception):
    def __init__(self, what: str, ours: object, theirs: object) -> None:
        super().__init__(f"{what}: the halves answer differently: ours {ours}, Dynamo's {theirs}")


@dataclass(frozen=True, slots=True)
class Comparison:
    """`folder` holds the inputs. `budget_s`: for one case of one half, all rounds together."""

    ours: Half
    theirs: Half
    folder: Path
    budget_s: float

    def both(self, call: str, **arguments: Any) -> tuple[Any, Any]:
        return self.ours.call(call, **arguments), self.theirs.call(call, **arguments)

    def latency(self, case: str, what: str, goal: Goal | None, call: str, **arguments: Any) -> Row:
        """Median microseconds of a call. The ratio is the median of the rounds' ratios, because both halves of a round
        meet about the same noise."""
        ours, theirs, ratios = [], [], []
        for number in range(ROUNDS):
            # The halves take turns at coming first, because the second one finds the CPU's clock warmed up.
            halves = (self.ours, self.theirs) if number % 2 else (self.theirs, self.ours)
            answers = {half: half.call(call, **arguments, budget_s=self.budget_s / ROUNDS) for half in halves}
            mine, peer = answers[self.ours], answers[self.theirs]
            if mine["check"] != peer["check"]:
                raise AnswersDifferError(f"{case}, {what}", mine["check"], peer["check"])
            ours += mine["us"]
            theirs += peer["us"]
            ratios.append(statistics.median(peer["us"]) / statistics.median(mine["us"]))
        details = {"ours_p99": percentile(ours, 99), "theirs_p99": percentile(theirs, 99)}
        details |= {"ours_min": min(ours), "theirs_min": min(theirs)}
        return Row(
            case,
            what,
            "us",
            statistics.median(ours),
            statistics.median(theirs),
            statistics.median(ratios),
            goal,
            details,
        )

    def latency_alone(self, case: str, what: str, goal: Goal | None, call: str, **arguments: Any) -> Row:
        """Like latency(), for calls that the peer does not have."""
        samples = self.ours.call(call, **arguments, budget_s=self.budget_s)["us"]
        details = {"ours_p99": percentile(samples, 99), "ours_min": min(samples)}
        return Row(case, what, "us", statistics.median(samples), None, None, goal, details)


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
