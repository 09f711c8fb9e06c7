"""What a run adds up to: a record for programs, a table for people. Records of several games add up to one."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.judging.leaks import Growth
from tests.chaos.judging.verdict import FAILURES, Judged, Outcome, Verdict

MOST = "most "  # begins the name of a number of which the largest counts


@dataclass(slots=True)
class Tally:
    """`warrants`: why errors were warranted. `skipped`: scenarios and faults that this machine cannot do, and why.
    `deaths`: lives of processes that ended. `wakes`: of models that slept. `leaked`: what was held after a round by
    requests that were over. `rounds_of`, `seconds_of`: by scenario."""

    requests: int = 0
    deaths: int = 0
    wakes: int = 0
    leaked: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    warrants: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    grammars: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    rounds_of: Counter[str] = field(default_factory=Counter)
    seconds_of: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    grown: list[Growth] = field(default_factory=list)
    to_strangers: Counter[str] = field(default_factory=Counter)
    most_times_slower: float = 0.0  # requests of a round under attack than in peace
    most_mib_more: int = 0  # of a router or worker under attack

    @property
    def rounds(self) -> int:
        return self.rounds_of.total()

    def count(self, outcome: Outcome, judged: Judged) -> bool:
        """Whether it is a failure."""
        self.requests += 1
        self.ways[outcome.ask.way] += 1
        self.verdicts[judged.verdict] += 1
        if outcome.ask.grammar is not None:
            self.grammars[outcome.ask.grammar.kind] += 1
        if judged.verdict is Verdict.WARRANTED:
            self.warrants[judged.why] += 1
        return judged.verdict in FAILURES

    def line(self) -> str:
        counts = ", ".join(f"{self.verdicts[verdict]} {verdict}" for verdict in Verdict)
        return f"{self.rounds} rounds, {self.requests} requests: {counts}"

    def results(self) -> dict[str, Any]:
        slopes: dict[str, list[float]] = {}
        for growth in self.grown:
            for kind, found in growth.mib_per_100_rounds.items():
                slopes.setdefault(kind, []).extend(found)
        return {
            "rounds": self.rounds,
            "faults": sum(self.faults.values()),
            "requests": self.requests,
            "verdicts": {str(verdict): self.verdicts[verdict] for verdict in Verdict},
            "warranted because": dict(self.warrants),
            "leaked": {what: self.leaked[what] for what in ("blocks", "leases", "files")},
            "most descriptors more in one life": max((one.most_descriptors for one in self.grown), default=0),
            "most threads more in one life": max((one.most_threads for one in self.grown), default=0),
            "MiB more per 100 rounds, of each life": slopes,
            "most times slower under attack": self.most_times_slower,
            "most MiB more under attack": self.most_mib_more,
            "to strangers": dict(self.to_strangers),
            "lives of processes ended": self.deaths,
            "models woken": self.wakes,
            "faults of each kind": dict(self.faults),
            "ways to ask": dict(self.ways),
            "requests with a grammar": dict(self.grammars),
            "rounds by scenario": dict(self.rounds_of),
            "seconds by scenario": dict(self.seconds_of),
            "left out": self.skipped,
            "failures": self.failures,
        }


def summed(results: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Numbers and lists are added, but for the largest of a kind; of texts one is kept."""
    total: dict[str, Any] = {}
    for one in results:
        for key, value in one.items():
            if key not in total or isinstance(value, str):
                total[key] = value
            elif isinstance(value, dict):
                total[key] = summed((total[key], value))
            else:
                total[key] = max(total[key], value) if key.startswith(MOST) else total[key] + value
    return total


def table(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of name and number."""
    rows: list[tuple[str, Any]] = [(name, results[name]) for name in ("rounds", "faults", "requests")]
    rows += [(f"  {verdict}", count) for verdict, count in results["verdicts"].items()]
    rows += [(f"    because {why}", count) for why, count in Counter(results["warranted because"]).most_common()]
    rows += [(f"leaked {what}", count) for what, count in results["leaked"].items()]
    rows += [(name, value) for name, value in results.items() if name.startswith((MOST, "lives"))]
    rows += [
        (f"MiB of memory more per 100 rounds, {kind}", f"{sum(found) / len(found):.2f} (mean of {len(found)} lives)")
        for kind, found in results["MiB more per 100 rounds, of each life"].items()
    ]
    rows += [(f"to strangers: {what}", count) for what, count in results["to strangers"].items()]
    rows += [(f"with a grammar, {kind}", count) for kind, count in results["requests with a grammar"].items()]
    rows += [(f"rounds of {name}", count) for name, count in results["rounds by scenario"].items()]
    rows += [(f"left out: {what}", why) for what, why in results["left out"].items()]
    rows += [("failures", len(results["failures"]))]
    return [(name, str(value)) for name, value in rows]
