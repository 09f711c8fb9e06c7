"""How fast the stepwise simulator is: events per second of one core, and a day of five million requests.

    python -m benchmarks.simulator_speed [--requests 500000] [--repeats 3] [--day 5000000] [--json FILE]

Fleets of 10, 100 and 1,000 workers, mixed or two fifths of them prefill workers, at 8 chat requests per second and
worker; the best of the repeats, in CPU seconds of the one thread that there is. An event is an arrival, a first token,
the end of a request, or the end of a worker's step; consecutive steps that only decode are one event. Making the
requests is not timed. The day's arrivals follow a sine from 0.2 to 1.8 times their mean rate.

`100 times 10 in turns`: a hundred fleets of 10 mixed workers, whose events take turns. They have the memory of 1,000
workers and the trees of 10, so that beside one such fleet in the same loop they tell what memory alone adds.

Goals: 3 million events per second everywhere; the day within two minutes; an event costs at 1,000 workers at most 1.25
times what it costs at 10. Exit code 1 when a goal is missed.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numba
import numpy as np
from msgspec import Struct
from numba.typed import List
from rich.console import Console
from rich.table import Table

from benchmarks.planner.workload import BIN_S, BINS_PER_DAY, chat_lengths, requests_of
from benchmarks.routing.report import machine, write_results
from router.placement.weights import Weights
from runtime.config.step_times import StepTimes
from simulator.requests import Requests
from simulator.stepwise.fleet import Layout, WorkerKind, fleet_of, simulate
from simulator.stepwise.kernel import ENDED, go_on
from simulator.stepwise.state import Fleet, Ints, new_state

RATE = 8.0  # requests/s of a worker
LEAST_EVENTS_PER_S, MOST_DAY_S, MOST_RATIO = 3e6, 120.0, 1.25
KIND = WorkerKind(StepTimes())
LAYOUTS = {
    f"{workers} {kind}": Layout(workers * 2 // 5, KIND, workers * 3 // 5, KIND)
    if kind == "split"
    else Layout(0, KIND, workers, KIND)
    for workers in (10, 100, 1000)
    for kind in ("mixed", "split")
}


class Row(Struct, frozen=True):
    case: str
    requests: int
    events: int
    cpu_s: float
    wall_s: float

    @property
    def event_ns(self) -> float:
        return self.cpu_s / self.events * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500_000, help="of each fleet")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--day", type=int, default=5_000_000, help="requests of the day, on 1,000 mixed workers")
    parser.add_argument("--json", type=Path, help="also write the rows there, with the machine and the command")
    options = parser.parse_args()
    began = machine()
    run("compiling", LAYOUTS["10 split"], _constant(LAYOUTS["10 split"], 1000))
    rows = []
    for case, layout in LAYOUTS.items():
        requests = _constant(layout, options.requests)
        rows.append(min((run(case, layout, requests) for _ in range(options.repeats)), key=lambda row: row.cpu_s))
    swing = 1 + 0.8 * np.sin(np.arange(BINS_PER_DAY) / BINS_PER_DAY * 2 * np.pi)
    day = requests_of(swing * options.day / (BINS_PER_DAY * BIN_S), chat_lengths, 0)
    rows.append(run("a day, 1000 mixed", LAYOUTS["1000 mixed"], day))
    ratios = {kind: _event_ns(rows, f"1000 {kind}") / _event_ns(rows, f"10 {kind}") for kind in ("mixed", "split")}
    in_turns(2, 1000)  # compiles
    turns = [
        min((in_turns(fleets, options.requests) for _ in range(options.repeats)), key=lambda row: row.cpu_s)
        for fleets in (1, 100)
    ]
    memory = turns[1].event_ns / turns[0].event_ns
    _print([*rows, *turns], ratios)
    print(f"memory alone: {memory:.2f} times")
    if options.json:
        write_results(
            options.json,
            "simulator_speed",
            began,
            {"rows": [*rows, *turns], "cost_1000_to_10": ratios, "memory_alone": memory},
        )
    missed = [row.case for row in rows if row.events / row.cpu_s < LEAST_EVENTS_PER_S]
    missed += [f"{row.case} took {row.wall_s:.0f} s" for row in rows[-1:] if row.wall_s > MOST_DAY_S]
    missed += [f"{kind}: cost x {ratio:.2f}" for kind, ratio in ratios.items() if ratio > MOST_RATIO]
    sys.exit(f"goals missed: {', '.join(missed)}" if missed else 0)


def run(case: str, layout: Layout, requests: Requests) -> Row:
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    answers = simulate(layout, requests, Weights())
    took = time.process_time() - cpu_s, time.perf_counter() - wall_s
    return Row(case, len(requests.arrival_s), answers.events, *took)


def in_turns(fleets: int, requests: int) -> Row:
    layout = LAYOUTS["10 mixed"]
    count = requests // fleets
    given = [_constant(layout, count, seed) for seed in range(fleets)]
    fleet = fleet_of(layout, Weights())
    states = List([new_state(fleet, one) for one in given])
    arrivals = List([one.arrival_s for one in given])
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    _in_turns(arrivals, fleet, states, np.zeros(fleets, dtype=np.int64))
    took = time.process_time() - cpu_s, time.perf_counter() - wall_s
    events = sum(int(state.events[0]) for state in states)
    return Row(f"{fleets} times 10 in turns", sum(len(one.arrival_s) for one in given), events, *took)


@numba.njit  # type: ignore[untyped-decorator]
def _in_turns(arrivals: Any, fleet: Fleet, states: Any, arrived: Ints) -> None:
    going = len(states)
    while going:
        for i in range(len(states)):
            if arrived[i] != ENDED:
                arrived[i] = go_on(arrived[i], arrivals[i], fleet, states[i])
                going -= arrived[i] == ENDED


def _constant(layout: Layout, count: int, seed: int = 0) -> Requests:
    rate = RATE * (layout.prefill + layout.decode)
    return requests_of(np.full(1, rate), chat_lengths, seed, bin_s=count / rate)


def _event_ns(rows: list[Row], case: str) -> float:
    return next(row.event_ns for row in rows if row.case == case)


def _print(rows: list[Row], ratios: dict[str, float]) -> None:
    table = Table("fleet")
    for header in ("requests", "events", "CPU s", "wall s", "million events/s", "ns an event"):
        table.add_column(header, justify="right")
    for row in rows:
        counts = (f"{row.requests:,}", f"{row.events:,}", f"{row.cpu_s:.2f}", f"{row.wall_s:.2f}")
        table.add_row(row.case, *counts, f"{row.events / row.cpu_s / 1e6:.2f}", f"{row.event_ns:.0f}")
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table)
    for kind, ratio in ratios.items():
        console.print(f"{kind}: an event costs {ratio:.2f} times as much at 1,000 workers as at 10")


if __name__ == "__main__":
    main()
