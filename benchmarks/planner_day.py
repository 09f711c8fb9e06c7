"""A day of real traffic through the planner in simulated time: the share of requests served in time, and GPU-hours.

    python -m benchmarks.planner_day --rates FILE [--days 9,0,12] [--seeds 0,1] [--lengths chat|FILE] [--processes 2]
                                     [--plot FILE.png] [--json FILE]

FILE has requests per second for each ten minutes of 14 days (ServeGen, M-large). Arrivals are Poisson at that rate,
which jumps from one ten minutes to the next; a day is scaled so that its peak needs 26 GPUs, and the budget is 32.
Workers follow the mock engine's formulas, four times slower than its defaults; a start takes 60 s. The planner's loop,
policies, guards and ladder are those that run live, at their defaults.

`oracle` knows the true rate of each ten minutes and has the fewest workers that serve 99 % of it in time; the number is
found by simulation, not by the planner's formulas, and its workers start and end at once. A request is met when
TTFT <= 1.5 s and mean ITL <= 60 ms. Goals for `slo`, on each day: at least 99 % met, at most 1.25 times the oracle's
GPU-hours, and at most 400 actions, of which less than 1 % are reversals within 60 s. Exit code 1 when a goal is missed.
"""

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.planner.case import (
    GPUS,
    ITL_S,
    POLICIES,
    TTFT_S,
    Case,
    Result,
    capacities,
    planner_config,
    run_case,
)
from benchmarks.routing.half import ROOT
from benchmarks.routing.report import machine, write_results
from planner.journal import Decided, Line
from planner.plot import plot_decisions

RATES = "servegen_m_large_rates.csv"
FOLDERS = (ROOT / "tests" / "data", ROOT.parent / "shared" / "data")
OURS = "slo"
LEAST_ATTAINMENT, MOST_RATIO, MOST_ACTIONS, MOST_REVERSALS = 0.99, 1.25, 400, 0.01
PLOTTED_EVERY = 6  # decisions


class Row(msgspec.Struct, frozen=True):
    """The means over all seeds of one day and policy."""

    day: int
    policy: str
    requests: float
    attainment: float
    ttft_attainment: float
    gpu_hours: float
    ratio: float  # to the oracle's GPU-hours
    actions: float
    reversals: float
    most_gpus: int
    goals_met: bool | None  # None: goals are for `slo` only


def main() -> None:
    options = _parse()
    console = Console() if sys.stdout.isatty() else Console(width=120)
    began = machine()
    prefill, decode = _carried(options)
    cases = [
        Case(str(options.rates), options.lengths, day, seed, policy, prefill, decode)
        for day in options.days
        for policy in options.policies
        for seed in options.seeds
    ]
    results = list(_run_all(cases, options.processes))
    rows = summary(results)
    _print_table(console, rows, options)
    if options.json:
        config = {policy: planner_config(policy) for policy in options.policies if policy != "oracle"}
        figures = {"prefill": prefill, "decode": decode}
        document = {"lengths": options.lengths, "planner": config, "carried": figures, "rows": rows, "runs": results}
        write_results(options.json, "planner_day", began, document)
    if options.plot:
        _plot(options.plot, next(case for case in cases if case.policy == OURS))
    missed = [f"day {row.day}" for row in rows if row.goals_met is False]
    sys.exit(f"goals missed: {', '.join(missed)}" if missed else 0)


def _parse() -> argparse.Namespace:
    default = next((folder / RATES for folder in FOLDERS if (folder / RATES).exists()), None)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=Path, default=default, help=f"path of {RATES}")
    parser.add_argument("--days", type=_numbers, default=[9, 0, 12], help="of the 14, from 0")
    parser.add_argument("--seeds", type=_numbers, default=[0, 1], help="of arrivals, lengths and timings")
    parser.add_argument("--policies", type=lambda text: text.split(","), default=list(POLICIES))
    parser.add_argument("--lengths", default="chat", help="`chat`, or a gzipped table of context and generated tokens")
    parser.add_argument("--processes", type=int, default=2, help="that simulate at a time")
    parser.add_argument("--carried", type=Path, help="result of an earlier run: what N workers carry is taken from it")
    parser.add_argument("--plot", type=Path, help="draw the first day under slo")
    parser.add_argument("--json", type=Path, help="also write rows and runs there, with the machine and the command")
    options = parser.parse_args()
    if options.rates is None or not options.rates.exists():
        parser.error(f"the file {options.rates or RATES} is not there; name it with --rates")
    if unknown := set(options.policies) - set(POLICIES):
        parser.error(f"no such policy: {', '.join(sorted(unknown))}; there are {', '.join(POLICIES)}")
    if options.plot and OURS not in options.policies:
        parser.error(f"--plot draws {OURS}, which is not among the policies")
    return options


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _carried(options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """The rates that 1, 2, ... prefill and decode workers carry."""
    if options.carried:
        figures = msgspec.json.decode(options.carried.read_bytes())["carried"]
        return figures["prefill"], figures["decode"]
    with Console(stderr=True).status("how much so many workers carry"):
        found = capacities(options.lengths)
    return found.prefill, found.decode


def _run_all(cases: list[Case], processes: int) -> Iterator[Result]:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=len(cases))
        with multiprocessing.Pool(processes) as pool:
            for result in pool.imap(run_case, cases):
                progress.advance(task)
                yield result


def summary(results: list[Result]) -> list[Row]:
    """One row per day and policy, in the order of the results."""
    groups: dict[tuple[int, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.day, result.policy), []).append(result)
    return [_row(day, policy, group) for (day, policy), group in groups.items()]


def _row(day: int, policy: str, group: list[Result]) -> Row:
    """The row of one day and policy. Each seed must meet the goals."""

    def mean(name: str) -> float:
        return statistics.fmean(getattr(result, name) for result in group)

    met = all(
        result.attainment >= LEAST_ATTAINMENT
        and result.gpu_hours <= MOST_RATIO * result.oracle_gpu_hours
        and result.actions <= MOST_ACTIONS
        and result.reversals < max(1, MOST_REVERSALS * result.actions)
        for result in group
    )
    return Row(
        day,
        policy,
        requests=mean("requests"),
        attainment=mean("attainment"),
        ttft_attainment=mean("ttft_attainment"),
        gpu_hours=mean("gpu_hours"),
        ratio=mean("gpu_hours") / mean("oracle_gpu_hours"),
        actions=mean("actions"),
        reversals=mean("reversals"),
        most_gpus=max(result.most_gpus for result in group),
        goals_met=met if policy == OURS else None,
    )


def _print_table(console: Console, rows: list[Row], options: argparse.Namespace) -> None:
    table = Table(title=f"{len(options.seeds)} seeds, at most {GPUS} GPUs", title_justify="left")
    columns = ("day", "policy", "requests", "in time", "TTFT", "GPU-hours", "x oracle", "actions", "reversals", "goals")
    for column in columns:
        table.add_column(column, justify="left" if column in ("policy", "goals") else "right")
    for row in rows:
        table.add_row(
            str(row.day),
            row.policy,
            f"{row.requests / 1e6:.2f}M",
            f"{row.attainment:.2%}",
            f"{row.ttft_attainment:.2%}",
            f"{row.gpu_hours:.1f}",
            f"{row.ratio:.3f}",
            f"{row.actions:.0f}",
            f"{row.reversals:.1f}",
            {True: "[green]met[/]", False: "[bold red]missed[/]", None: ""}[row.goals_met],
        )
    console.print(table)


def _plot(path: Path, case: Case) -> None:
    lines: list[Line] = []
    run_case(case, lines)
    decisions = [line for line in lines if isinstance(line, Decided)][::PLOTTED_EVERY]
    observations, targets = [line.observation for line in decisions], [line.target for line in decisions]
    plot_decisions(path, observations, [targets], (TTFT_S * 1e3, ITL_S * 1e3))


if __name__ == "__main__":
    main()
