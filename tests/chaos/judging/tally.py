"""What a run adds up to: counts, a table for people, a record for programs."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.judging.leaks import Growth
from tests.chaos.judging.verdict import FAILURES, Judged, Outcome, Verdict


@dataclass(slots=True)
class Tally:
    """`warrants`: why errors were warranted. `skipped`: faults that this machine cannot do, and why. `deaths`: lives of
    processes that ended. `rounds_of`, `seconds_of`: by scenario."""

    rounds: int = 0
    requests: int = 0
    deaths: int = 0
    leaked: int = 0
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    warrants: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    rounds_of: Counter[str] = field(default_factory=Counter)
    seconds_of: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    grown: dict[str, list[Growth]] = field(default_factory=dict)

    def count(self, outcome: Outcome, judged: Judged) -> bool:
        """Whether it is a failure."""
        self.requests += 1
        self.ways[outcome.ask.way] += 1
        self.verdicts[judged.verdict] += 1
        if judged.verdict is Verdict.WARRANTED:
            self.warrants[judged.why] += 1
        return judged.verdict in FAILURES

    def stretch(self, scenario: str, rounds: int, seconds: float) -> None:
        self.rounds_of[scenario] += rounds
        self.seconds_of[scenario] += round(seconds)

    def note_growth(self, scenario: str, grown: Growth) -> None:
        self.grown.setdefault(scenario, []).append(grown)

    def line(self) -> str:
        counts = ", ".join(f"{self.verdicts[verdict]} {verdict}" for verdict in Verdict)
        return f"{self.rounds} rounds, {self.requests} requests: {counts}"

    def table(self) -> list[tuple[str, str]]:
        most = [one for all_ in self.grown.values() for one in all_]
        rows = [("rounds", self.rounds), ("faults", sum(self.faults.values())), ("requests", self.requests)]
        rows += [(f"  {verdict}", self.verdicts[verdict]) for verdict in Verdict]
        rows += [(f"    because {why}", count) for why, count in self.warrants.most_common()]
        rows += [("rounds that left blocks or leases behind", self.leaked), ("lives of processes ended", self.deaths)]
        rows += [("most descriptors more in one life", max((one.most_descriptors for one in most), default=0))]
        rows += [("most threads more in one life", max((one.most_threads for one in most), default=0))]
        rows += [(f"MiB of memory more per 100 rounds, {kind}", mib) for kind, mib in self.memory().items()]  # type: ignore[misc]
        rows += [(f"not struck: {fault}", why) for fault, why in self.skipped.items()]  # type: ignore[misc]
        rows += [("failures", len(self.failures))]
        return [(name, str(value)) for name, value in rows]

    def memory(self) -> dict[str, float]:
        """Mean slope by kind of process."""
        slopes: dict[str, list[float]] = {}
        for one in (one for all_ in self.grown.values() for one in all_):
            for kind, mib in one.mib_per_100_rounds.items():
                slopes.setdefault(kind, []).append(mib)
        return {kind: round(sum(all_) / len(all_), 2) for kind, all_ in slopes.items()}

    def results(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "requests": self.requests,
            "verdicts": {str(verdict): self.verdicts[verdict] for verdict in Verdict},
            "warranted because": dict(self.warrants),
            "ways to ask": dict(self.ways),
            "faults": dict(self.faults),
            "rounds by scenario": dict(self.rounds_of),
            "seconds by scenario": dict(self.seconds_of),
            "rounds that left blocks or leases": self.leaked,
            "lives of processes ended": self.deaths,
            "memory slope, MiB per 100 rounds": self.memory(),
            "faults this machine cannot do": self.skipped,
            "failures": self.failures,
        }
