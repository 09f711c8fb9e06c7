"""Early refusal: whom it refuses wrongly, and what an overloaded fleet still serves in time.

    python -m benchmarks.early_refusal [--kinds agents,documents | tuned | held-out | all] [--fleet mixed]
        [--loads 0.8,2] [--seeds 0,1] [--rules router,foresees] [--due-ms 2000] [--seconds 25] [--requests N]
        [--probes 100] [--json FILE]

Simulated time, with the workers, traffic and fleets of routing_quality; each request is weighed by the router's own
placement, which knows what is on its way to the workers, and refused by the router's own rule.

The capacity is the highest rate at which the same fleet, refusing nobody, has 99 % of first tokens in time; a load is a
multiple of it. `at best` is what it serves in time of the traffic of that load when a constant share of it, the best of
several in hindsight, is let in by the dice. The goal is held against the larger of the two, in requests. Where answers
take long, so must the run (`--seconds`): a rate that fills the fleet only after the end passes for its capacity.

The run forks at some of the refusals, and the copy lets the request in and goes on with the same arrivals and the same
rule until it is due. A refusal was wrong if in the copy the request is in time and nobody comes late who had been let
in before and is in time in the run. Because a promise has been made to those, a request that is in time only by making
one of them late could not have been met. Requests that come later were promised nothing: for them, first come is first
served. `in time alone` is the larger share that is in time in its copy, whoever comes late for it.

What this measure does not forgive is caution: where a rule leaves time to spare, each single request would fit into
it, and each refusal counts as wrong, although all of them together would not fit. It does not see the opposite either:
a rule that lets all in is never wrong. Therefore `late of those let in` belongs to it.

Rules: `router`; `foresees`, which forks at each decision and lets in whoever is in time and makes nobody late: what is
possible; `but noise`, which knows all but how long the coming steps take. The last two are slow and for mixed fleets.
Figures are of the time after the first third. Goals of the router's rule: at most 2 % wrong refusals; at load 2, 95 %
of the larger capacity in time. Exit code 1 when a goal is missed.
"""

import argparse
import dataclasses
import logging
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
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
    "but noise": partial(Foreseeing, foresees_noise=False),
}
WARM = 1 / 3  # of the run
IN_TIME = 0.99  # of first tokens, at the capacity
SHARES = (0.45, 0.55, 0.65, 0.8)  # of the requests, that are let in by the dice
SEARCHES = 5  # each halves what the capacity may be
GOAL_WRONG, GOAL_GOODPUT = 0.02, 0.95
COLUMNS = (
    *("capacity/s", "at best", "refused", "wrongly", "in time alone", "probes", "late of those let in"),
    *("in time/s", "of goal's", "expected too high, ms"),
)


class Row(Struct, frozen=True):
    kind: str
    load: float
    seed: int
    rule: str
    capacity_per_s: float
    best_per_s: float  # of this traffic, a share of it let in
    refused: float
    wrong: float | None  # None: nobody was refused
    in_time_alone: float | None  # of the refused, whoever came late for it
    probes: int
    late: float  # of those that were let in
    in_time_per_s: float
    goodput: float  # in time, of the larger capacity
    too_high_ms: list[float]  # what was expected less what came, of those let in: 5, 50 and 95 %


class Trial:
    """One kind of traffic and one fleet."""

    def __init__(self, kind: str, seed: int, options: argparse.Namespace) -> None:
        self._seed = seed
        self._options, self._due_s = options, options.due_ms / 1e3
        self._fleet = dataclasses.replace(FLEETS[options.fleet], noise=NOISE, expects=True, due_ms=options.due_ms)
        self._requests = traffic(kind, TRACE_FOLDERS, self._fleet.block_size, options.requests, SEED + seed)
        self._rate = len(self._requests) / (self._requests[-1].batch_s - self._requests[0].batch_s)

    def run(self, per_s: float, rule: str = "router", **settings: Any) -> Refusing:
        """At so many requests a second."""
        count, seconds = round(per_s * self._options.seconds), self._options.seconds
        assert count <= len(self._requests), f"{count} requests are needed: see --requests"
        run = RULES[rule](self._fleet, self._seed, **settings, from_s=WARM * seconds)
        for now_s, request in arrivals(self._requests[:count], per_s / self._rate, self._seed):
            run.arrive(now_s, request)
        run.until(float("inf"))
        return run

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

    def capacity_per_s(self) -> float:
        low, high = 0.0, self._rate
        while self.late(self.run(high, share=1.0)) <= 1 - IN_TIME:
            low, high = high, 2 * high
        for _ in range(SEARCHES):
            middle = (low + high) / 2
            if self.late(self.run(middle, share=1.0)) <= 1 - IN_TIME:
                low = middle
            else:
                high = middle
        return low

    def best_per_s(self, per_s: float) -> float:
        return max(self.in_time_per_s(self.run(per_s, share=share)) for share in SHARES)

    def too_high_ms(self, run: Refusing) -> list[float]:
        let_in = [fate for fate in self.judged(run) if not fate.refused]
        errors = [(fate.expected_s - fate.ttft_s) * 1e3 for fate in let_in if fate.expected_s < math.inf]
        return [float(error) for error in np.percentile(errors, (5, 50, 95))] if errors else []


def rows_of(kind: str, seed: int, options: argparse.Namespace) -> list[Row]:
    trial = Trial(kind, seed, options)
    capacity = trial.capacity_per_s()
    rows = []
    for load in options.loads:
        per_s = load * capacity
        best = trial.best_per_s(per_s) if load > 1 else capacity
        expected = max(1.0, per_s * options.seconds * (1 - WARM) * max(0.0, 1 - 1 / load))  # are refused
        for rule in options.rules:
            run = trial.run(per_s, rule, probes=min(1.0, options.probes / expected))
            judged, in_time, count = trial.judged(run), trial.in_time_per_s(run), len(run.probes)
            wrong, alone = (
                sum(run.was_wrong(probe, spares=spares) for probe in run.probes) / count if count else None
                for spares in (True, False)
            )
            refused = sum(fate.refused for fate in judged) / len(judged)
            goodput = in_time / (max(capacity, best) if load >= 1 else per_s)
            shares = (refused, wrong, alone, count, trial.late(run))
            figures = (capacity, best, *shares, in_time, goodput, trial.too_high_ms(run))
            rows.append(Row(kind, load, seed, rule, *figures))
    return rows


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
    parser.add_argument("--seconds", type=float, default=25.0, help="of simulated time in each run")
    parser.add_argument(
        "--requests", type=int, default=12_000, help="of each kind, of which a run takes the first ones"
    )
    parser.add_argument("--probes", type=float, default=100, help="refusals that are looked at, about")
    parser.add_argument("--json", type=Path, help="also write the rows there, with the machine and the command")
    options = parser.parse_args()
    began = machine()
    rows = [row for kind in options.kinds for seed in options.seeds for row in rows_of(kind, seed, options)]
    table = Table("kind", "load", "seed", "rule", *COLUMNS)
    for row in rows:
        rates = (f"{row.capacity_per_s:.1f}", f"{row.best_per_s:.1f}")
        wrong = ["-" if share is None else f"{share:.1%}" for share in (row.wrong, row.in_time_alone)]
        shown = (f"{row.refused:.1%}", *wrong, str(row.probes), f"{row.late:.1%}", f"{row.in_time_per_s:.1f}")
        errors = " ".join(f"{error:.0f}" for error in row.too_high_ms)
        cell = (row.kind, f"{row.load:g}", str(row.seed), row.rule)
        table.add_row(*cell, *rates, *shown, f"{row.goodput:.1%}", errors)
    Console().print(table)
    if options.json:
        write_results(options.json, "early_refusal", began, {"rows": rows})
    missed = [
        f"{row.kind} at load {row.load:g}"
        for row in rows
        if row.rule == "router" and ((row.wrong or 0) > GOAL_WRONG or (row.load == 2 and row.goodput < GOAL_GOODPUT))
    ]
    sys.exit(f"goals missed: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
