"""Early refusal: whom it refuses wrongly, and what an overloaded fleet still serves in time.

    python -m benchmarks.early_refusal [--kinds agents,documents | tuned | held-out | all] [--fleet mixed]
        [--loads 0.8,2] [--seeds 0,1] [--rules router,foresees] [--due-ms 2000] [--seconds 30] [--requests N]
        [--probes 100] [--json FILE]

Simulated time, with the workers, traffic and fleets of routing_quality; each request is weighed by the router's own
placement, which knows what is on its way to the workers, and refused by the router's own rule.

The highest rate is searched at which the same fleet, refusing nobody, has 99 % of first tokens in time; a load is a
multiple of it. The capacity is what comes in time per second at that rate, counted as all that is in time per second
here is. `at best` is what the fleet serves in time of the traffic of that load when a constant share of it, the best of
several in hindsight, is let in by the dice. The goal is held against the larger of the two, in requests. Where answers
take long, so must the run (`--seconds`): a rate that fills the fleet only after the end passes for its capacity. For
agents 30 s are not enough: at load 2 their KV fills the pools after 26 s.

The yardstick has changed: until 27 November 2026 the capacity was the rate itself, and was searched with runs of 14 s
(agents) and 20 s (documents). `of rate` holds what is in time against the larger of that rate, searched with the
present runs, and `at best`, as before.

The run forks at some of the refusals, and the copy lets the request in and goes on with the same arrivals and the same
rule until it is due. A refusal was wrong if in the copy the request is in time and nobody comes late who had been let
in before and is in time in the run. Because a promise has been made to those, a request that is in time only by making
one of them late could not have been met. Requests that come later were promised nothing: for them, first come is first
served. `in time alone` is the larger share that is in time in its copy, whoever comes late for it. Brackets hold 95 %
intervals (Wilson) of what so few probes tell.

What this measure does not forgive is caution: where a rule leaves time to spare, each single request would fit into
it, and each refusal counts as wrong, although all of them together would not fit. It does not see the opposite either:
a rule that lets all in is never wrong. Therefore `late of those let in` belongs to it. Three figures stand beside it
and replace nothing, the goal least of all:

- `of meetable`: the wrongly refused as a share of all requests that could have been met, which are they and those that
  were let in and are in time. It is an estimate from the probes.
- `harmless`: the refusals that were wrong though also those who came until the request was due count: of them, too,
  everyone who is in time in the run is in time in the copy. As one request more shifts all later steps, and somebody
  is refused or late by such a chance, this share is too low: where nothing but step times changes, nobody is lost in
  about four of ten copies (documents).
- `gain`: how many more requests, of all those, are in time in the copy than in the run, on average, with the standard
  error. At 0, refusals cost nothing: who is let in takes the place of another; at 1, each costs a request. Chance moves
  it either way.

Rules: `router`; `foresees`, which forks at each decision and lets in whoever is in time and makes nobody late: what is
possible. The last one is slow and for mixed fleets.
Figures are of the time after the first third. Goals of the router's rule: at most 2 % wrong refusals; at load 2, 95 %
of the larger capacity in time. Exit code 1 when a goal is missed.
"""

import argparse
import dataclasses
import logging
import math
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import structlog
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from benchmarks.quality.refusal import Fate, Foreseeing, Refusing
from benchmarks.quality.trace import arrivals
from benchmarks.quality.traffic import SEED, traffic
from benchmarks.routing.report import machine, write_results
from benchmarks.routing_quality import FLEETS, HALVES, NOISE, TRACE_FOLDERS

RULES: dict[str, Callable[..., Refusing]] = {
    "router": Refusing,
    "foresees": Foreseeing,
}
WARM = 1 / 3  # of the run
IN_TIME = 0.99  # of first tokens, at the capacity
SHARES = (0.3, 0.4, 0.5, 0.6, 0.8)  # of the requests, that are let in by the dice: less is in time behind the best one
QUANTILE = 1.96  # of the normal distribution: 95 % lie within so many deviations
PRECISION = 1 / 32  # of the rate that is searched
GOAL_WRONG, GOAL_GOODPUT = 0.02, 0.95
LEAST_S = 30.0  # of a run: in a shorter one, answers have not yet filled the fleet
LOOKS = 100  # requests between looks at whether a rate is too high

Range = tuple[float, float]


class Probed(Struct, frozen=True):
    """What copies of the run saw of the refused that they let in; shares are None where there are no copies."""

    probes: int
    wrong: float | None = None
    wrong_range: Range | None = None  # 95 %
    wrong_of_meetable: float | None = None  # an estimate
    in_time_alone: float | None = None  # whoever came late for it
    harmless: float | None = None  # nobody came late for it, whenever it came
    harmless_range: Range | None = None
    gain: float | None = None  # requests more that are in time, for each that is let in
    gain_error: float | None = None  # its standard error

    @classmethod
    def of(cls, run: Refusing, refused: float, late: float) -> "Probed":
        """`refused`: the share of the requests; `late`: of those that were let in."""
        probes, count = run.probes, len(run.probes)
        if not count:
            return cls(0)
        wrong, alone = (sum(run.was_wrong(probe, spares=spares) for probe in probes) for spares in (True, False))
        harmless, gains = sum(map(run.was_harmless, probes)), [run.gain(probe) for probe in probes]
        missed, met = refused * wrong / count, (1 - refused) * (1 - late)
        return cls(
            probes=count,
            wrong=wrong / count,
            wrong_range=interval(wrong, count),
            wrong_of_meetable=missed / (missed + met) if missed + met else None,
            in_time_alone=alone / count,
            harmless=harmless / count,
            harmless_range=interval(harmless, count),
            gain=fmean(gains),
            gain_error=stdev(gains) / math.sqrt(count) if count > 1 else None,
        )


def interval(hits: int, count: int) -> Range:
    """Wilson's 95 % interval of a share."""
    share, spread = hits / count, QUANTILE**2 / count
    middle, half = share + spread / 2, QUANTILE * math.sqrt(share * (1 - share) / count + spread / count / 4)
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


class Row(Struct, frozen=True):
    kind: str
    load: float
    seed: int
    rule: str
    rate_per_s: float  # the highest one with IN_TIME of first tokens in time
    capacity_per_s: float  # first tokens in time at that rate
    best_per_s: float  # of this traffic, a share of it let in
    refused: float
    probed: Probed
    late: float  # of those that were let in
    in_time_per_s: float
    goodput: float  # in time, of the larger of capacity and best
    goodput_of_rate: float  # of the larger of rate and best
    too_high_ms: list[float]  # what was expected less what came, of those let in: 5, 50 and 95 %


class Trial:
    """One kind of traffic and one fleet."""

    def __init__(self, kind: str, seed: int, options: argparse.Namespace) -> None:
        self._seed = seed
        self._options, self._due_s = options, options.due_ms / 1e3
        self._fleet = dataclasses.replace(FLEETS[options.fleet], noise=NOISE, expects=True, due_ms=options.due_ms)
        self._requests = traffic(kind, TRACE_FOLDERS, self._fleet.block_size, options.requests, SEED + seed)
        self._rate = len(self._requests) / (self._requests[-1].batch_s - self._requests[0].batch_s)

    def run(self, per_s: float, rule: str = "router", most_late: float = 1.0, **settings: Any) -> Refusing:
        """Runs the trial at so many requests a second. It breaks off when a larger share than `most_late` must come
        late."""
        count = round(per_s * self._options.seconds)
        assert count <= len(self._requests), f"{count} requests are needed: see --requests"
        coming = list(arrivals(self._requests[:count], per_s / self._rate, self._seed))
        from_s = WARM * coming[-1][0]
        run = RULES[rule](self._fleet, self._seed, **settings, from_s=from_s)
        most = most_late * sum(now_s > from_s for now_s, _ in coming)
        for place, (now_s, request) in enumerate(coming):
            run.arrive(now_s, request)
            if place % LOOKS == 0 and most_late < 1 and self._overdue(run, from_s, now_s) > most:
                return run
        run.until(coming[-1][0] + 3 * self._due_s)  # copies have answered by then
        return run

    def _overdue(self, run: Refusing, from_s: float, now_s: float) -> int:
        came = (fate for fate in run.fates.values() if from_s < fate.arrived_s < now_s - self._due_s)
        return sum(fate.ttft_s > self._due_s for fate in came)

    def judged(self, run: Refusing) -> list[Fate]:
        fates = list(run.fates.values())
        return [fate for fate in fates if fate.arrived_s > WARM * fates[-1].arrived_s]

    def in_time_per_s(self, run: Refusing) -> float:
        """First tokens in time, after warming up."""
        end_s = max(fate.arrived_s for fate in run.fates.values())
        times = [fate.arrived_s + fate.ttft_s for fate in run.fates.values() if fate.ttft_s <= self._due_s]
        return sum(WARM * end_s < at_s <= end_s for at_s in times) / (end_s * (1 - WARM))

    def late(self, run: Refusing) -> float:
        let_in = [fate for fate in self.judged(run) if not fate.refused]
        return sum(fate.ttft_s > self._due_s for fate in let_in) / len(let_in)

    def capacity(self) -> tuple[float, float]:
        """The highest rate, and what is in time per second at that rate."""
        low, high, in_time = 0.0, math.inf, 0.0
        while high - low > PRECISION * low:
            per_s = (low + high) / 2 if high < math.inf else max(2 * low, self._rate)
            run = self.run(per_s, most_late=1 - IN_TIME, share=1.0)
            if self.late(run) > 1 - IN_TIME:
                high = per_s
            else:
                low, in_time = per_s, self.in_time_per_s(run)
        return low, in_time

    def best_per_s(self, per_s: float) -> float:
        best = 0.0
        for share in SHARES:
            in_time = self.in_time_per_s(self.run(per_s, share=share))
            if in_time < best:
                break
            best = in_time
        return best

    def too_high_ms(self, run: Refusing) -> list[float]:
        came = [fate for fate in self.judged(run) if max(fate.expected_s, fate.ttft_s) < math.inf]
        errors = [(fate.expected_s - fate.ttft_s) * 1e3 for fate in came]
        return [float(error) for error in np.percentile(errors, (5, 50, 95))] if errors else []


def rows_of(kind: str, seed: int, options: argparse.Namespace) -> list[Row]:
    trial = Trial(kind, seed, options)
    rate, capacity = trial.capacity()
    rows = []
    for load in options.loads:
        per_s = load * rate
        best = trial.best_per_s(per_s) if load > 1 else capacity
        expected = max(1.0, per_s * options.seconds * (1 - WARM) * max(0.0, 1 - 1 / load))  # are refused
        for rule in options.rules:
            run = trial.run(per_s, rule, probes=min(1.0, options.probes / expected))
            judged, in_time, late = trial.judged(run), trial.in_time_per_s(run), trial.late(run)
            refused = sum(fate.refused for fate in judged) / len(judged)
            goodputs = [in_time / (max(yard, best) if load >= 1 else load * yard) for yard in (capacity, rate)]
            probed = Probed.of(run, refused, late)
            measured = (late, in_time, *goodputs, trial.too_high_ms(run))
            rows.append(Row(kind, load, seed, rule, rate, capacity, best, refused, probed, *measured))
    return rows


def print_rows(rows: list[Row]) -> None:
    """The figures of one kind below each other, the runs side by side."""
    table = Table(rows[0].kind, *(f"load {row.load:g}\nseed {row.seed}\n{row.rule}" for row in rows))
    shown = [figures(row) for row in rows]
    for name in shown[0]:
        table.add_row(name, *(one[name] for one in shown))
    Console().print(table)


def figures(row: Row) -> dict[str, str]:
    probed = row.probed

    def share(value: float | None, limits: Range | None = None) -> str:
        text = "-" if value is None else f"{value:.1%}"
        return text if limits is None else f"{text} ({limits[0]:.0%} to {limits[1]:.0%})"

    return {
        "rate/s": f"{row.rate_per_s:.1f}",
        "capacity/s": f"{row.capacity_per_s:.1f}",
        "at best/s": f"{row.best_per_s:.1f}",
        "refused": share(row.refused),
        "probes": str(probed.probes),
        "wrongly": share(probed.wrong, probed.wrong_range),
        "of meetable": share(probed.wrong_of_meetable),
        "in time alone": share(probed.in_time_alone),
        "harmless": share(probed.harmless, probed.harmless_range),
        "gain": "-" if probed.gain_error is None else f"{probed.gain:.2f} +- {probed.gain_error:.2f}",
        "late of those let in": share(row.late),
        "in time/s": f"{row.in_time_per_s:.1f}",
        "of goal's": share(row.goodput),
        "of rate": share(row.goodput_of_rate),
        "expected too high, ms": " ".join(f"{error:.0f}" for error in row.too_high_ms),
    }


def _kinds(text: str) -> list[str]:
    return [kind for name in text.split(",") for kind in HALVES.get(name, (name,))]


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", type=_kinds, default=["agents", "documents"])
    parser.add_argument("--fleet", choices=list(FLEETS), default="mixed")
    parser.add_argument("--loads", type=lambda text: list(map(float, text.split(","))), default=[0.8, 2.0])
    parser.add_argument("--seeds", type=lambda text: list(map(int, text.split(","))), default=[0], help="of all dice")
    parser.add_argument("--rules", type=lambda text: text.split(","), default=["router"], help=", ".join(RULES))
    parser.add_argument("--due-ms", type=float, default=2000.0, help="when each first token is due")
    parser.add_argument("--seconds", type=float, default=LEAST_S, help="of simulated time in each run")
    parser.add_argument(
        "--requests", type=int, default=16_000, help="of each kind, of which a run takes the first ones"
    )
    parser.add_argument("--probes", type=float, default=100, help="refusals that are looked at, about")
    parser.add_argument("--json", type=Path, help="also write the rows there, with the machine and the command")
    options = parser.parse_args()
    if options.seconds < LEAST_S:
        parser.error(f"--seconds is at least {LEAST_S:g}: a shorter run does not show what a fleet can keep up")
    began = machine()
    rows: list[Row] = []
    for kind, seed in product(options.kinds, options.seeds):
        rows += rows_of(kind, seed, options)
        if options.json:
            write_results(options.json, "early_refusal", began, {"rows": rows})
    for kind in options.kinds:
        print_rows([row for row in rows if row.kind == kind])
    missed = [
        f"{row.kind} at load {row.load:g}"
        for row in rows
        if row.rule == "router"
        and ((row.probed.wrong or 0) > GOAL_WRONG or (row.load == 2 and row.goodput < GOAL_GOODPUT))
    ]
    sys.exit(f"goals missed: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
