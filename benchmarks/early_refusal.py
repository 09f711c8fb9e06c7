"""Early refusal: whom it refuses wrongly, and what an overloaded fleet still serves in time.

    python -m benchmarks.early_refusal [--kinds agents,documents | tuned | held-out | all] [--fleet mixed]
        [--loads 0.8,2] [--due-ms 2000] [--seconds 25] [--requests N] [--probes 100] [--json FILE]

Simulated time, with the workers, traffic and fleets of routing_quality; each request is weighed by the router's own
placement, which knows what is on its way to the workers, and refused by the router's own rule.

The capacity is the highest rate at which the same fleet, refusing nobody, has 99 % of first tokens in time; a load is a
multiple of it. `at best` is what it serves in time of the traffic of that load when a constant share of it, the best of
several in hindsight, is let in by the dice. The goal is held against the larger of the two, in requests.

A refusal was wrong if the request had been in time: the run forks at some of the refusals, and the copy lets the
request in and goes on with the same arrivals until its first token, or until it is due. The run itself is not
disturbed. Figures are of the time after the first third. Goals: at most 2 % wrong refusals; at load 2, 95 % of the
larger capacity in time. Exit code 1 when a goal is missed.
"""

import argparse
import dataclasses
import logging
import os
import random
import sys
from functools import partial
from pathlib import Path

import structlog
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from benchmarks.quality.policies import Placed
from benchmarks.quality.simulation import Fleet, Run
from benchmarks.quality.trace import TraceRequest, arrivals
from benchmarks.quality.traffic import traffic
from benchmarks.quality.worker import Job
from benchmarks.routing.report import machine, write_results
from benchmarks.routing_quality import FLEETS, HALVES, NOISE, TRACE_FOLDERS
from router.placement.candidates import NO_WORK
from router.placement.early_refusal import TooLate, check_in_time
from router.placement.placement import weigh
from runtime.config.serving import PlacementConfig

CONFIG = PlacementConfig(prefill_queue_tokens=2**31 - 1)  # simulated requests wait at the workers
WARM = 1 / 3  # of the run
IN_TIME = 0.99  # of first tokens, at the capacity
SHARES = (0.45, 0.55, 0.65, 0.8)  # of the requests, that are let in by the dice
SEARCHES = 5  # each halves what the capacity may be
GOAL_WRONG, GOAL_GOODPUT = 0.02, 0.95


class Fate(Struct):
    """What became of one request."""

    arrived_s: float
    refused: bool
    ttft_s: float = float("inf")


class Row(Struct, frozen=True):
    kind: str
    load: float
    capacity_per_s: float
    best_per_s: float  # of this traffic, a share of it let in
    refused: float
    wrong: float | None  # None: nobody was refused
    probes: int
    late: float  # of those that were let in
    in_time_per_s: float
    goodput: float  # in time, of the larger capacity


class Refusing(Run):
    """`share`: of the requests is let in, whatever the rule says; None: the rule decides. `probes`: the share of the
    refused that is looked at."""

    def __init__(self, fleet: Fleet, *, share: float | None = None, probes: float = 0.0, from_s: float = 0.0) -> None:
        super().__init__(fleet, partial(Placed, CONFIG), 0)
        self.fates: dict[int, Fate] = {}
        self.wrong: list[bool] = []  # of the probes
        self._share, self._probes, self._from_s, self._dice = share, probes, from_s, random.Random(0)
        self._probe: int | None = None  # this is the copy that lets that one in

    def arrive(self, now_s: float, request: TraceRequest) -> None:
        self.until(now_s)
        self.router.now_s = now_s
        refused = self._refuses(request) if self._share is None else self._dice.random() >= self._share
        self.fates[request.number] = Fate(now_s, refused)
        if refused and self._probe is None and now_s > self._from_s and self._dice.random() < self._probes:
            copy = os.fork()
            if copy:
                self.wrong.append(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == 1)
            else:
                self._probe, refused = request.number, False
        if not refused:
            super().arrive(now_s, request)

    def _refuses(self, request: TraceRequest) -> bool:
        facts, due_ms = self.router.question(request), self.fleet.due_ms
        try:
            weighing = weigh(facts.request, facts.decode, facts.prefill, CONFIG, self._dice, due_ms=due_ms)
            check_in_time(weighing, NO_WORK, due_ms)
        except TooLate:
            return True
        return False

    def until(self, end_s: float) -> None:
        if self._probe is None:
            super().until(end_s)
            return
        fate = self.fates[self._probe]
        due_s = fate.arrived_s + self.fleet.due_ms / 1e3
        super().until(min(end_s, due_s))
        if fate.ttft_s < float("inf") or end_s >= due_s:
            os._exit(fate.arrived_s + fate.ttft_s <= due_s)

    def note(self, job: Job) -> None:
        super().note(job)
        self.fates[job.request.number].ttft_s = job.first_token_s - job.arrived_s


class Trial:
    """One kind of traffic and one fleet."""

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        self._options, self._due_s = options, options.due_ms / 1e3
        self._fleet = dataclasses.replace(FLEETS[options.fleet], noise=NOISE, expects=True, due_ms=options.due_ms)
        self._requests = traffic(kind, TRACE_FOLDERS, self._fleet.block_size, options.requests)
        self._rate = len(self._requests) / (self._requests[-1].batch_s - self._requests[0].batch_s)

    def run(self, per_s: float, **rule: float) -> Refusing:
        """At so many requests a second."""
        count, seconds = round(per_s * self._options.seconds), self._options.seconds
        assert count <= len(self._requests), f"{count} requests are needed: see --requests"
        run = Refusing(self._fleet, **rule, from_s=WARM * seconds)
        for now_s, request in arrivals(self._requests[:count], per_s / self._rate, 0):
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


def rows_of(kind: str, options: argparse.Namespace) -> list[Row]:
    trial = Trial(kind, options)
    capacity = trial.capacity_per_s()
    rows = []
    for load in options.loads:
        per_s = load * capacity
        expected = max(1.0, per_s * options.seconds * (1 - WARM) * max(0.0, 1 - 1 / load))  # are refused
        run = trial.run(per_s, probes=min(1.0, options.probes / expected))
        best, in_time = trial.best_per_s(per_s) if load > 1 else capacity, trial.in_time_per_s(run)
        judged = trial.judged(run)
        goodput = in_time / (max(capacity, best) if load >= 1 else per_s)
        refused = sum(fate.refused for fate in judged) / len(judged)
        wrong = sum(run.wrong) / len(run.wrong) if run.wrong else None
        figures = (refused, wrong, len(run.wrong), trial.late(run), in_time, goodput)
        rows.append(Row(kind, load, capacity, best, *figures))
    return rows


def _kinds(text: str) -> list[str]:
    return [kind for name in text.split(",") for kind in HALVES.get(name, (name,))]


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", type=_kinds, default=["agents", "documents"])
    parser.add_argument("--fleet", choices=list(FLEETS), default="mixed")
    parser.add_argument("--loads", type=lambda text: list(map(float, text.split(","))), default=[0.8, 2.0])
    parser.add_argument("--due-ms", type=float, default=2000.0, help="when each first token is due")
    parser.add_argument("--seconds", type=float, default=25.0, help="of simulated time in each run")
    parser.add_argument(
        "--requests", type=int, default=12_000, help="of each kind, of which a run takes the first ones"
    )
    parser.add_argument("--probes", type=float, default=100, help="refusals that are looked at, about")
    parser.add_argument("--json", type=Path, help="also write the rows there, with the machine and the command")
    options = parser.parse_args()
    began = machine()
    rows = [row for kind in options.kinds for row in rows_of(kind, options)]
    columns = (
        "capacity/s",
        "at best",
        "refused",
        "wrongly",
        "probes",
        "late of those let in",
        "in time/s",
        "of goal's",
    )
    table = Table("kind", "load", *columns)
    for row in rows:
        wrong = "-" if row.wrong is None else f"{row.wrong:.1%}"
        rates = (f"{row.capacity_per_s:.1f}", f"{row.best_per_s:.1f}")
        shown = (f"{row.refused:.1%}", wrong, str(row.probes), f"{row.late:.1%}", f"{row.in_time_per_s:.1f}")
        table.add_row(row.kind, f"{row.load:g}", *rates, *shown, f"{row.goodput:.1%}")
    Console().print(table)
    if options.json:
        write_results(options.json, "early_refusal", began, {"rows": rows})
    missed = [
        f"{row.kind} at load {row.load:g}"
        for row in rows
        if (row.wrong or 0) > GOAL_WRONG or (row.load == 2 and row.goodput < GOAL_GOODPUT)
    ]
    sys.exit(f"goals missed: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
