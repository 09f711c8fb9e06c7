"""Quality of routing: what a policy finds in caches and how long first tokens take, on many kinds of traffic.

    python -m benchmarks.routing_quality [--kinds conversation,agents | tuned | held-out | all] [--rates 1,6]
        [--fleets mixed,split,unequal] [--seeds 0,1,2] [--requests N] [--host-tier 4] [--routers 2]
        [--policies "Baton;Dynamo, scale 16"] [--processes 2] [--json FILE]

The traffic runs in simulated time through the router's real placement, ledger and radix tree and the engine's real
block manager. Fleets: `mixed`, 8 workers that prefill and decode; `split`, 4 that prefill and 4 that decode;
`unequal`, 8 mixed ones of which every other is half as fast. Each worker has a million tokens of KV in blocks of 64.
Steps last as the mock engine's formula says, twice as fast as its defaults: because a million tokens of an 8B model's
KV are 147 GB, a worker is two H200s; steps with prompts vary by a tenth. Timestamps of the conversation trace come in
batches of 3 s and are spread by the seed. The other kinds and their parameters stand in quality/traffic.py. All
policies have the same workers and the same eviction, and all take a prompt that is on its way to a worker for cached
there, as the router does.

`Dynamo` stands for the cost that Dynamo's router minimises, with the queued prompt blocks that it counts as load, at
its defaults and at prefill_load_scale 16; `static` for the best of several settings of its weights, chosen for each
cell in hindsight, for mean and p99 apart. Regret is a time divided by the best that any policy has in the same cell.
Goals: mean and p99 TTFT at most 1.02 times the best in every cell; at least 28 % of prompt tokens found in the
whole conversation trace at rate 1 in a mixed fleet. Exit code 1 when a goal is missed.

With --routers, as many routers place the requests, which come to one of them at random; `Baton, one router` is then one
policy more, for the regret of several.

With --host-tier, each worker also has host memory for KV, so many times as much as its device; what comes back from
there costs what 50 GB/s take. The goal is then 35 %.
"""

import argparse
import dataclasses
import logging
import multiprocessing
import sys
from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean

import structlog
from msgspec import Struct, structs
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.quality.policies import LeastLoaded, LongestPrefix, MakePolicy, Placed, Weighted
from benchmarks.quality.simulation import Fleet, simulate
from benchmarks.quality.trace import TraceRequest, arrivals
from benchmarks.quality.traffic import GENERATORS, HELD_OUT, TUNED, traffic
from benchmarks.quality.worker import SimulatedEngine
from benchmarks.routing.half import ROOT
from benchmarks.routing.report import machine, write_results
from router.placement.weights import Weights

TRACE_FOLDERS = (ROOT / "tests" / "data", ROOT / "shared" / "data", ROOT.parent / "shared" / "data")
GPUS_PER_WORKER = 2
FLEET = Fleet(engine=SimulatedEngine(speed_up=GPUS_PER_WORKER), expects=True)
FLEETS = {
    "mixed": FLEET,
    "split": dataclasses.replace(FLEET, workers=4, prefill_workers=4),
    "unequal": dataclasses.replace(FLEET, speeds=(1.0, 0.5)),
}
NOISE = 0.1  # of a prompt step's time
OURS, ALONE, STATIC = "Baton", "Baton, one router", "static"
SETTINGS = ((4, 1, 1), (16, 3, 1), (16, 1, 0), (16, 7, 1), (1, 1, 0.25))  # prefill, overlap and load weights of STATIC
POLICIES: dict[str, MakePolicy] = {
    "least loaded": LeastLoaded,
    "longest prefix": LongestPrefix,
    "Dynamo, defaults": partial(Weighted, 1.0, 1.0, 1.0),
    "Dynamo, scale 16": partial(Weighted, 16.0, 1.0, 1.0),
    **{f"{STATIC} {' '.join(map(str, setting))}": partial(Weighted, *setting) for setting in SETTINGS},
    OURS: partial(Placed, Weights()),
    ALONE: partial(Placed, Weights()),
}
HALVES = {"tuned": TUNED, "held-out": HELD_OUT, "all": (*TUNED, *HELD_OUT)}
GOAL_REGRET = 1.02
WHOLE_TRACE = 12_031  # requests of the conversation trace
GOAL_HIT_RATE = 0.28  # conversation trace, rate 1
GOAL_HIT_RATE_TIERED = 0.35  # with a host tier of four times the device


class Cell(Struct, frozen=True):
    fleet: str
    kind: str
    rate: float


class Run(Struct, frozen=True):
    cell: Cell
    policy: str
    seed: int
    hit_rate: float
    mean_ttft_ms: float
    p50_ttft_ms: float
    p99_ttft_ms: float


class Row(Struct, frozen=True):
    """The means over the seeds, and the regret of the times: against the best of all rows of the cell."""

    cell: Cell
    policy: str
    hit_rate: float
    mean_ttft_ms: float
    p50_ttft_ms: float
    p99_ttft_ms: float
    mean_regret: float = 1.0
    p99_regret: float = 1.0
    goals_met: bool | None = None  # None: only our policy has goals


def main() -> None:
    options = _parse()
    console = Console() if sys.stdout.isatty() else Console(width=120)
    cells = [Cell(*names) for names in product(options.fleets, options.kinds, options.rates)]
    jobs = list(product(cells, options.policies, options.seeds))
    runs = list(_run_all(jobs, options))
    goal_hit_rate = GOAL_HIT_RATE_TIERED if options.host_tier else GOAL_HIT_RATE
    rows = summary(runs, goal_hit_rate if options.requests >= WHOLE_TRACE else 0.0)
    _print_rows(console, rows, len(options.seeds))
    _print_means(console, rows)
    if options.json:
        _write_json(options.json, rows, runs, options)
    missed = [f"{row.cell.fleet} {row.cell.kind} x{row.cell.rate:g}" for row in rows if row.goals_met is False]
    sys.exit(f"goals missed: {', '.join(missed)}" if missed else 0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", type=_kinds, default=["conversation"], help="of traffic, or names of trace files")
    parser.add_argument("--fleets", type=_fleets, default=["mixed"], help=", ".join(FLEETS))
    parser.add_argument("--data", type=Path, help="folder of the recorded traces")
    parser.add_argument("--rates", type=_numbers, default=[1.0, 6.0], help="how many times as fast as recorded")
    parser.add_argument("--seeds", type=_numbers, default=[0, 1, 2], help="of arrivals and ties")
    parser.add_argument("--requests", type=int, default=WHOLE_TRACE, help="of each kind, from the beginning")
    parser.add_argument("--block-size", type=int, default=FLEET.block_size, help="larger: quicker, and less exact")
    parser.add_argument("--kv-tokens", type=int, default=FLEET.tokens_per_worker, help="of each worker's device")
    parser.add_argument("--host-tier", type=float, default=0.0, help="host memory for KV, times the device's")
    parser.add_argument("--routers", type=int, default=1, help="that place the requests")
    parser.add_argument("--policies", type=_policies, help=f"with ; between them: {'; '.join(POLICIES)}")
    parser.add_argument("--processes", type=int, default=2, help="that simulate at a time")
    parser.add_argument("--json", type=Path, help="also write rows and runs there, with the machine and the command")
    options = parser.parse_args()
    options.policies = options.policies or [name for name in POLICIES if name != ALONE or options.routers > 1]
    return options


def _kinds(text: str) -> list[str]:
    return [kind for name in text.split(",") for kind in HALVES.get(name, (name,))]


def _fleets(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - FLEETS.keys():
        raise argparse.ArgumentTypeError(f"no fleet {', '.join(sorted(unknown))}: there are {', '.join(FLEETS)}")
    return names


def _policies(text: str) -> list[str]:
    names = text.split(";")
    if unknown := set(names) - POLICIES.keys():
        raise argparse.ArgumentTypeError(f"no policy {'; '.join(sorted(unknown))}: there are {'; '.join(POLICIES)}")
    return names


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def _run_all(jobs: list[tuple[Cell, str, float]], options: argparse.Namespace) -> Iterator[Run]:
    run = partial(_run, options)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=len(jobs))
        with multiprocessing.Pool(options.processes) as pool:
            for done in pool.imap(run, jobs):
                progress.advance(task)
                yield done


@lru_cache(maxsize=2)
def _requests(kind: str, data: Path | None, block_size: int, limit: int) -> list[TraceRequest]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    return traffic(kind, (data, *TRACE_FOLDERS) if data else TRACE_FOLDERS, block_size, limit)


def _run(options: argparse.Namespace, job: tuple[Cell, str, float]) -> Run:
    cell, policy, seed = job
    requests = _requests(cell.kind, options.data, options.block_size, options.requests)
    fleet = dataclasses.replace(
        FLEETS[cell.fleet],
        block_size=options.block_size,
        tokens_per_worker=options.kv_tokens,
        host_tier=options.host_tier,
        noise=NOISE,
        routers=1 if policy == ALONE else options.routers,
    )
    outcome = simulate(arrivals(requests, cell.rate, int(seed)), fleet, POLICIES[policy], int(seed))
    times = (outcome.mean_ttft_ms, outcome.ttft_ms(50), outcome.ttft_ms(99))
    return Run(cell, policy, int(seed), outcome.hit_rate, *times)


def summary(runs: list[Run], goal_hit_rate: float = GOAL_HIT_RATE) -> list[Row]:
    """One row per cell and policy, in the order of the runs; of the settings of STATIC one row, see `_judged`."""
    groups: dict[tuple[Cell, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.cell, run.policy), []).append(run)
    rows = [_mean(members) for members in groups.values()]
    return [row for cell in dict.fromkeys(row.cell for row in rows) for row in _judged(cell, rows, goal_hit_rate)]


def _mean(runs: list[Run]) -> Row:
    def mean(name: str) -> float:
        return fmean(getattr(run, name) for run in runs)

    times = (mean("mean_ttft_ms"), mean("p50_ttft_ms"), mean("p99_ttft_ms"))
    return Row(runs[0].cell, runs[0].policy, mean("hit_rate"), *times)


def _judged(cell: Cell, rows: list[Row], goal_hit_rate: float) -> Iterator[Row]:
    """STATIC's row has the mean of the setting that is best by mean, and the p99 of the one that is best by p99."""
    here = [row for row in rows if row.cell == cell]
    static = [row for row in here if row.policy.startswith(STATIC)]
    if static:
        best, least = min(static, key=lambda row: row.mean_ttft_ms), min(static, key=lambda row: row.p99_ttft_ms)
        names = best.policy if best is least else f"{best.policy} |{least.policy.removeprefix(STATIC)}"
        both = structs.replace(best, policy=names, p99_ttft_ms=least.p99_ttft_ms)
        here = [both if row is best else row for row in here if row not in static or row is best]
    mean_ms, p99_ms = min(row.mean_ttft_ms for row in here), min(row.p99_ttft_ms for row in here)
    for row in here:
        regrets = (row.mean_ttft_ms / mean_ms, row.p99_ttft_ms / p99_ms)
        met = None
        if row.policy == OURS:
            met = max(regrets) <= GOAL_REGRET
            met &= cell != Cell("mixed", "conversation", 1.0) or row.hit_rate >= goal_hit_rate
        yield structs.replace(row, mean_regret=regrets[0], p99_regret=regrets[1], goals_met=met)


def geometric_means(rows: list[Row]) -> dict[tuple[str, str], tuple[float, float]]:
    """(half of the kinds, policy) -> mean regrets, all settings of STATIC as one policy."""
    logs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        half = "tuned" if row.cell.kind in TUNED else "held-out"
        policy = STATIC if row.policy.startswith(STATIC) else row.policy
        logs.setdefault((half, policy), []).append((row.mean_regret, row.p99_regret))
    return {
        key: (geometric_mean(one for one, _ in regrets), geometric_mean(one for _, one in regrets))
        for key, regrets in logs.items()
    }


def _print_rows(console: Console, rows: list[Row], num_seeds: int) -> None:
    table = Table(title=f"TTFT in ms, {num_seeds} seeds", title_justify="left")
    words = ("fleet", "kind", "policy", "goals")
    for column in ("fleet", "kind", "rate", "policy", "found", "mean", "p50", "p99", "regret", "p99's", "goals"):
        table.add_column(column, justify="left" if column in words else "right")
    for row in rows:
        verdict = {True: "[green]met[/]", False: "[bold red]missed[/]", None: ""}[row.goals_met]
        times = (row.mean_ttft_ms, row.p50_ttft_ms, row.p99_ttft_ms)
        names = (row.cell.fleet, row.cell.kind, f"x{row.cell.rate:g}", row.policy, f"{row.hit_rate:.1%}")
        regrets = (f"{row.mean_regret:.3f}", f"{row.p99_regret:.3f}")
        table.add_row(*names, *(f"{ms:,.0f}" for ms in times), *regrets, verdict)
    console.print(table)


def _print_means(console: Console, rows: list[Row]) -> None:
    table = Table(title="Regret, geometric means over the cells", title_justify="left")
    for column in ("kinds", "policy", "mean TTFT", "p99"):
        table.add_column(column, justify="left" if column in ("kinds", "policy") else "right")
    for (half, policy), (mean, p99) in geometric_means(rows).items():
        table.add_row(half, policy, f"{mean:.3f}", f"{p99:.3f}")
    console.print(table)


def _write_json(path: Path, rows: list[Row], runs: list[Run], options: argparse.Namespace) -> None:
    sizes = {"block_size": options.block_size, "kv_tokens": options.kv_tokens, "host_tier": options.host_tier}
    means = [[*key, *value] for key, value in geometric_means(rows).items()]
    results = {**sizes, "engine": FLEET.engine, "generators": GENERATORS, "means": means, "rows": rows, "runs": runs}
    write_results(path, "routing_quality", machine(), results)


if __name__ == "__main__":
    main()
