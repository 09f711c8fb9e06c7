"""Early refusal: whom it refuses wrongly, and what an overloaded fleet still serves in time.

    python -m benchmarks.early_refusal [--kinds agents,documents] [--fleet mixed] [--loads 0.8,2] [--due-ms 2000]
        [--requests N] [--probes 0.2] [--json FILE]

Simulated time, with the workers, traffic and fleets of routing_quality; each request is weighed by the router's own
placement, which knows what is on its way to the workers, and refused by the router's own rule. The capacity is what the
same fleet answers per second when far too much comes and nobody is refused; a load is a multiple of it. Of the requests
that the rule refuses, a share is served all the same (`--probes`): those of them that are in time were refused wrongly.
Figures are of the time after the first fifth. Goals: at most 2 % wrong refusals; at load 2, 95 % of the capacity in
time. Exit code 1 when a goal is missed.
"""

import argparse
import dataclasses
import logging
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
from benchmarks.routing_quality import FLEETS, NOISE, TRACE_FOLDERS
from router.placement.candidates import NO_WORK
from router.placement.early_refusal import TooLate, check_in_time
from router.placement.placement import weigh
from runtime.config.serving import PlacementConfig

CONFIG = PlacementConfig(prefill_queue_tokens=2**31 - 1)  # simulated requests wait at the workers
SATURATING = 128.0  # rate
WARM = 0.2  # of the run
GOAL_WRONG, GOAL_GOODPUT = 0.02, 0.95


class Fate(Struct):
    """What became of one request."""

    arrived_s: float
    refused: bool
    probe: bool  # served all the same
    ttft_s: float = float("inf")


class Row(Struct, frozen=True):
    kind: str
    load: float
    refused: float
    wrong: float | None  # None: too few were refused
    probes: int
    late: float  # of those that were let in
    goodput: float  # in time per second, of the capacity


class Refusing(Run):
    def __init__(self, fleet: Fleet, seed: int, probes: float) -> None:
        super().__init__(fleet, partial(Placed, CONFIG), seed)
        self.fates: dict[int, Fate] = {}
        self._probes, self._dice = probes, random.Random(seed)

    def arrive(self, now_s: float, request: TraceRequest) -> None:
        self.until(now_s)
        self.router.now_s = now_s
        facts, due_ms = self.router.question(request), self.fleet.due_ms
        try:
            weighing = weigh(facts.request, facts.decode, facts.prefill, CONFIG, self._dice, due_ms=due_ms)
            check_in_time(weighing, NO_WORK, due_ms)
            refused = False
        except TooLate:
            refused = True
        fate = self.fates[request.number] = Fate(now_s, refused, refused and self._dice.random() < self._probes)
        if not refused or fate.probe:
            super().arrive(now_s, request)

    def note(self, job: Job) -> None:
        super().note(job)
        self.fates[job.request.number].ttft_s = job.first_token_s - job.arrived_s


def fates_of(requests: list[TraceRequest], rate: float, options: argparse.Namespace, due_ms: float) -> list[Fate]:
    fleet = dataclasses.replace(FLEETS[options.fleet], noise=NOISE, expects=True, due_ms=due_ms)
    run = Refusing(fleet, 0, options.probes)
    for now_s, request in arrivals(requests, rate, 0):
        run.arrive(now_s, request)
    run.until(float("inf"))
    return list(run.fates.values())


def served_per_s(fates: list[Fate], within_s: float) -> float:
    """First tokens per second after warming up, of those that were let in and came in time."""
    end_s = fates[-1].arrived_s
    warm_s = fates[0].arrived_s + WARM * (end_s - fates[0].arrived_s)
    times = [fate.arrived_s + fate.ttft_s for fate in fates if not fate.refused and fate.ttft_s <= within_s]
    return sum(warm_s < at_s <= end_s for at_s in times) / (end_s - warm_s)


def rows_of(kind: str, options: argparse.Namespace) -> list[Row]:
    requests = traffic(kind, TRACE_FOLDERS, FLEETS[options.fleet].block_size, options.requests)
    full = fates_of(requests, SATURATING, options, float("inf"))
    capacity = served_per_s(full, float("inf"))
    per_rate = len(full) / (full[-1].arrived_s - full[0].arrived_s) / SATURATING
    rows = []
    for load in options.loads:
        fates = fates_of(requests, load * capacity / per_rate, options, options.due_ms)
        due_s, judged = options.due_ms / 1e3, fates[int(WARM * len(fates)) :]
        probes = [fate for fate in judged if fate.probe]
        let_in = [fate for fate in judged if not fate.refused]
        rows.append(
            Row(
                kind,
                load,
                sum(fate.refused for fate in judged) / len(judged),
                sum(fate.ttft_s <= due_s for fate in probes) / len(probes) if probes else None,
                len(probes),
                sum(fate.ttft_s > due_s for fate in let_in) / len(let_in),
                served_per_s(fates, due_s) / capacity,
            )
        )
    return rows


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["agents", "documents"])
    parser.add_argument("--fleet", choices=list(FLEETS), default="mixed")
    parser.add_argument("--loads", type=lambda text: list(map(float, text.split(","))), default=[0.8, 2.0])
    parser.add_argument("--due-ms", type=float, default=2000.0, help="when each first token is due")
    parser.add_argument("--requests", type=int, default=6000, help="of each kind")
    parser.add_argument("--probes", type=float, default=0.2, help="share of the refused that is served all the same")
    parser.add_argument("--json", type=Path, help="also write the rows there, with the machine and the command")
    options = parser.parse_args()
    began = machine()
    rows = [row for kind in options.kinds for row in rows_of(kind, options)]
    table = Table("kind", "load", "refused", "wrongly", "probes", "late of those let in", "in time, of capacity")
    for row in rows:
        wrong = "-" if row.wrong is None else f"{row.wrong:.1%}"
        shown = (f"{row.refused:.1%}", wrong, str(row.probes), f"{row.late:.1%}", f"{row.goodput:.1%}")
        table.add_row(row.kind, f"{row.load:g}", *shown)
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
