"""What the router costs when the engines cost nothing: requests/s, time to the first token, CPU per request.

    python -m benchmarks.frontend_load [--cases 1,5] [--seconds 4] [--rounds 3] [--json FILE]
    python -m benchmarks.frontend_load --list

A real service with mock workers whose steps take no time, in one process beside the router's; this process is the
client, all on the same cores. Requests stream over HTTP; of each prompt three quarters are one of 16 shared prefixes
(the system message of a chat), the rest is unique. The router's CPU is that of its process, from /proc. The best
round counts, by CPU per request; all rounds are in the JSON. Dynamo's figures are those of its own frontend with its
fast tokenizer on another 2-core machine, for orientation. Exit code 1 when a goal is missed.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import psutil
import uvloop
from msgspec import Struct
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from baton.config import ServingConfig
from baton.config_overrides import with_overrides
from baton.logging import configure_logging
from baton.supervisor import ROUTER_ID, Supervisor
from benchmarks.frontend.cases import CASES, Case, bodies
from benchmarks.frontend.load_client import Load, Measured
from benchmarks.routing.report import BUSY_LOAD, commit, machine
from engine.served_model import served_model
from router.tokenizer import Tokenizer

WARM_UP_S = 1.0
VERSIONS = ("grpcio", "httptools", "msgspec", "tokenizers", "uvicorn", "uvloop")


class Round(Struct, frozen=True):
    """One run of one case."""

    requests: int
    requests_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    total_p50_ms: float
    router_cpu_ms: float  # per request


class Row(Struct, frozen=True):
    case: str
    best: Round
    rounds: list[Round]
    goals_met: bool | None  # None: it has none
    dynamo: str


def main() -> None:
    options = _parse()
    console = Console() if sys.stdout.isatty() else Console(width=140)
    began = machine()
    if began["load_1min"] > BUSY_LOAD:
        console.print(
            f"[yellow]The machine is busy (load {began['load_1min']}): the figures look worse than they are.[/]"
        )
    rows = asyncio.run(_measure(options))
    _print_table(console, f"Router under load on {began['cpu']}, {began['cores']} cores", rows)
    if options.json:
        _write_json(options.json, rows, began)
    missed = [row.case for row in rows if row.goals_met is False]
    sys.exit(f"goals missed: {', '.join(missed)}" if missed else 0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=_chosen, default=CASES, help="numbers of --list; default all")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3, help="of each case")
    parser.add_argument("--tokenizer", default="smollm2", help="whose text is counted: mock.tokenizer of serving.yaml")
    parser.add_argument("--json", type=Path, help="also write the rows there, with the machine, versions and command")
    options = parser.parse_args()
    if options.list:
        sys.exit("\n".join(f"{number}  {case.name}" for number, case in enumerate(CASES, 1)))
    return options


def _chosen(text: str) -> Sequence[Case]:
    try:
        return [CASES[int(number) - 1] for number in text.split(",")]
    except (ValueError, IndexError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 1 to {len(CASES)}") from None


async def _measure(options: argparse.Namespace) -> list[Row]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    rows = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for fleet, cases in groupby(options.cases, key=lambda case: (case.prefill, case.decode)):
            task = progress.add_task(f"starting {fleet[0]} prefill and {fleet[1]} decode workers")
            config = _config(options.tokenizer, *fleet)
            configure_logging(config.logging, "benchmark")
            with tempfile.TemporaryDirectory(prefix="baton-load-") as log_dir:
                async with Supervisor(config, Path(log_dir)) as service:
                    for case in cases:
                        progress.update(task, description=case.name)
                        rows.append(await _case(case, service, options))
            progress.remove_task(task)
    return rows


def _config(tokenizer: str, prefill: int, decode: int) -> ServingConfig:
    overrides: dict[str, Any] = {
        "model": "mock",
        "mock": {"tokenizer": tokenizer, "speed_up": 1e9, "answer_tokens": 4096},
        "workers": {"prefill": prefill, "decode": decode},
        "router": {"http_port": 0, "grpc_port": 0},
        "engine": {"max_batch_tokens": 16384},
    }
    return with_overrides(ServingConfig(), overrides, "benchmark")


async def _case(case: Case, service: Supervisor, options: argparse.Namespace) -> Row:
    files = served_model(service.config)
    tokenizer = Tokenizer(files.folder, files.config.vocab_size)
    router = psutil.Process(service.children[ROUTER_ID].pid)
    requests = bodies(case, tokenizer, seed=len(case.name))
    load = Load(service.address("http"), requests.path, iter(requests))
    await _run(load, case.concurrency, min(WARM_UP_S, options.seconds))
    rounds = []
    for _ in range(options.rounds):
        before_s = _cpu_s(router)
        measured = await _run(load, case.concurrency, options.seconds)
        rounds.append(_round(measured, _cpu_s(router) - before_s))
    best = min(rounds, key=lambda one: one.router_cpu_ms)
    return Row(case.name, best, rounds, _goals_met(case, best), case.dynamo)


async def _run(load: Load, concurrency: int, seconds: float) -> Measured:
    """In a thread with uvloop, which costs less but cannot start the service's processes."""
    return await asyncio.to_thread(lambda: uvloop.run(load.run(concurrency, seconds)))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _round(measured: Measured, router_cpu_s: float) -> Round:
    count = len(measured.ttft_s)
    return Round(
        requests=count,
        requests_per_s=count / measured.duration_s,
        ttft_p50_ms=statistics.median(measured.ttft_s) * 1e3,
        ttft_p99_ms=sorted(measured.ttft_s)[int(0.99 * (count - 1))] * 1e3,
        total_p50_ms=statistics.median(measured.total_s) * 1e3,
        router_cpu_ms=router_cpu_s / count * 1e3,
    )


def _goals_met(case: Case, best: Round) -> bool | None:
    met = [
        value <= goal
        for value, goal in ((best.ttft_p50_ms, case.max_ttft_ms), (best.router_cpu_ms, case.max_cpu_ms))
        if goal is not None
    ]
    return all(met) if met else None


def _print_table(console: Console, title: str, rows: list[Row]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("case", "requests/s", "TTFT p50 ms", "p99", "whole p50", "router CPU ms", "goals", "Dynamo"):
        table.add_column(column, justify="left" if column in ("case", "goals", "Dynamo") else "right", no_wrap=True)
    for row in rows:
        best = row.best
        verdict = {True: "[green]met[/]", False: "[bold red]missed[/]", None: ""}[row.goals_met]
        figures = (best.ttft_p50_ms, best.ttft_p99_ms, best.total_p50_ms, best.router_cpu_ms)
        table.add_row(row.case, f"{best.requests_per_s:,.0f}", *(f"{f:.2f}" for f in figures), verdict, row.dynamo)
    console.print(table)


def _write_json(path: Path, rows: list[Row], began: dict[str, Any]) -> None:
    document = {
        "benchmark": "frontend_load",
        "command": " ".join(["python", "-m", "benchmarks.frontend_load", *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": began,
        "commit": commit(),
        "versions": dict(_versions()),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")


def _versions() -> Iterator[tuple[str, str]]:
    from importlib.metadata import version

    yield "python", sys.version.split()[0]
    for name in VERSIONS:
        yield name, version(name)


if __name__ == "__main__":
    main()
