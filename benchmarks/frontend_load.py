"""The router's own cost, measured with engines that cost nothing: requests/s, TTFT, CPU per request.

    python -m benchmarks.frontend_load [--cases 1,5] [--seconds 4] [--rounds 3] [--json FILE]
    python -m benchmarks.frontend_load --with-dynamo [--dynamo-tokenizer default]
    python -m benchmarks.frontend_load --list

The service is real; its mock workers, whose steps take no time, share one process beside the router's. This process is
the client, and all three run on the same cores. Requests stream over HTTP. Three quarters of each prompt are one of 16
shared prefixes (the system message of a chat), the rest is unique. The router's CPU is that of its process, from /proc.
The round with the least CPU per request counts; all rounds are in the JSON. Exit code 1 when a goal is missed.

With --with-dynamo, Dynamo's frontend and mock workers run beside ours, and each round of ours is followed by one of
theirs with the same requests. Otherwise Dynamo's figures are those of its own frontend with its fast tokenizer on
another 2-core machine, for orientation.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import psutil
import uvloop
from msgspec import structs
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from baton.service.supervisor import Supervisor
from benchmarks.frontend.cases import CASES, Case, bodies
from benchmarks.frontend.dynamo_peer import TOKENIZERS, DynamoService, PeerFailedError
from benchmarks.frontend.load_client import Load, Measured
from benchmarks.frontend.report import Round, Row, best, print_comparison, print_table, write_json
from benchmarks.frontend.same_answers import AnswersDifferError, check_same_answers
from benchmarks.routing.peer_environment import DYNAMO_VERSION, PeerMissingError, dynamo_frontend_python
from benchmarks.routing.report import BUSY_LOAD, machine
from router.text.tokenizer import Tokenizer
from runtime.checkpoint.mock_model import BYTES
from runtime.checkpoint.served_model import served_model
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig
from runtime.config.step_times import StepTimes
from runtime.telemetry.logging import configure_logging

WARM_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class Target:
    """A service under load."""

    address: str
    process: psutil.Process  # the process whose CPU counts


def main() -> None:
    options = _parse()
    console = Console() if sys.stdout.isatty() else Console(width=140)
    try:
        python = dynamo_frontend_python(console) if options.with_dynamo else None
        began = machine()
        if began["load_1min"] > BUSY_LOAD:
            console.print(
                f"[yellow]The machine is busy (load {began['load_1min']}): the figures are worse than they are.[/]"
            )
        rows, dynamo = asyncio.run(_measure(options, python))
    except (PeerMissingError, PeerFailedError, AnswersDifferError) as error:
        sys.exit(str(error))
    (print_comparison if dynamo else print_table)(
        console, f"Router under load on {began['cpu']}, {began['cores']} cores", rows
    )
    if options.json:
        write_json(options.json, rows, began, dynamo)
    missed = [row.case for row in rows if row.goals_met is False]
    sys.exit(f"goals missed: {', '.join(missed)}" if missed else 0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=chosen, default=CASES, help="numbers of --list; default all")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=3, help="of each case")
    parser.add_argument("--tokenizer", default="smollm2", help="whose text is counted: mock.tokenizer of serving.yaml")
    parser.add_argument("--json", type=Path, help="also write the rows there, with the machine, versions and command")
    parser.add_argument(
        "--with-dynamo", action="store_true", help=f"measure Dynamo {DYNAMO_VERSION} in turns with ours"
    )
    parser.add_argument("--dynamo-tokenizer", choices=TOKENIZERS, default=TOKENIZERS[0], help="its --tokenizer")
    options = parser.parse_args()
    if options.list:
        sys.exit("\n".join(f"{number}  {case.name}" for number, case in enumerate(CASES, 1)))
    if options.with_dynamo and options.tokenizer == BYTES:
        parser.error(f"Dynamo needs the tokenizer of a model, not {BYTES!r}")
    return options


def chosen(text: str) -> Sequence[Case]:
    try:
        return [CASES[int(number) - 1] for number in text.split(",")]
    except (ValueError, IndexError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 1 to {len(CASES)}") from None


async def _measure(options: argparse.Namespace, python: Path | None) -> tuple[list[Row], dict[str, Any] | None]:
    """The rows, and a description of Dynamo when `python`, the interpreter of its environment, is given."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    rows: list[Row] = []
    commands: list[str] = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for fleet, cases in groupby(options.cases, key=lambda case: (case.prefill, case.decode)):
            task = progress.add_task(f"starting {fleet[0]} prefill and {fleet[1]} decode workers")
            config = service_config(options.tokenizer, *fleet)
            configure_logging(config.logging, "benchmark")
            async with AsyncExitStack() as services:
                log_dir = services.enter_context(tempfile.TemporaryDirectory(prefix="baton-load-"))
                ours = await services.enter_async_context(Supervisor(config, Path(log_dir)))
                targets = [Target(ours.address("http"), psutil.Process(ours.children["router-1"].pid))]
                if python is not None:
                    peer = DynamoService(python, served_model(config), config, options.dynamo_tokenizer)
                    await services.enter_async_context(peer)
                    targets.append(Target(peer.address, psutil.Process(peer.pid)))
                    commands += peer.commands()
                for case in cases:
                    progress.update(task, description=case.name)
                    rows.append(await _case(case, config, targets, options))
            progress.remove_task(task)
    if python is None:
        return rows, None
    return rows, {"version": DYNAMO_VERSION, "tokenizer": options.dynamo_tokenizer, "commands": commands}


def service_config(tokenizer: str, prefill: int, decode: int) -> ServingConfig:
    overrides: dict[str, Any] = {
        "model": "mock",
        "mock": {"tokenizer": tokenizer, "answer_tokens": 4096},
        "step_times": msgspec.to_builtins(StepTimes().faster(1e9)),
        "workers": {"prefill": prefill, "decode": decode},
        "router": {"http_port": 0, "grpc_port": 0},
        "engine": {"max_batch_tokens": 16384},
    }
    return with_overrides(ServingConfig(), overrides, "benchmark")


async def _case(case: Case, config: ServingConfig, targets: Sequence[Target], options: argparse.Namespace) -> Row:
    """The targets take turns, ours before Dynamo's if that is there, with the same requests in the same order."""
    files = served_model(config)
    tokenizer = Tokenizer(files.folder, files.config.vocab_size)
    model = files.name if options.with_dynamo else None
    requests = bodies(case, tokenizer, seed=len(case.name), model=model)
    if options.with_dynamo:
        await check_same_answers([target.address for target in targets], requests)
    loads = [Load(target.address, requests.path, iter(requests)) for target in targets]
    for load in loads:
        await run_load(load, case.concurrency, min(WARM_UP_S, options.seconds))
    rounds: list[list[Round]] = [[] for _ in targets]
    for _ in range(options.rounds):
        for target, load, done in zip(targets, loads, rounds, strict=True):
            before_s = cpu_s(target.process)
            measured = await run_load(load, case.concurrency, options.seconds)
            done.append(round_of(measured, cpu_s(target.process) - before_s))
    ours, *theirs = rounds
    row = Row(case.name, best(ours), ours, _goals_met(case, best(ours)), case.dynamo)
    return structs.replace(row, dynamo_best=best(theirs[0]), dynamo_rounds=theirs[0]) if theirs else row


async def run_load(load: Load, concurrency: int, seconds: float) -> Measured:
    """Runs the load in a thread with uvloop, which costs less CPU but cannot start the service's processes."""
    return await asyncio.to_thread(lambda: uvloop.run(load.run(concurrency, seconds)))


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def round_of(measured: Measured, router_cpu_s: float) -> Round:
    count = len(measured.ttft_s)
    return Round(
        requests=count,
        requests_per_s=count / measured.duration_s,
        ttft_p50_ms=statistics.median(measured.ttft_s) * 1e3,
        ttft_p99_ms=sorted(measured.ttft_s)[int(0.99 * (count - 1))] * 1e3,
        total_p50_ms=statistics.median(measured.total_s) * 1e3,
        router_cpu_ms=router_cpu_s / count * 1e3,
        events=measured.events / count,
    )


def _goals_met(case: Case, best: Round) -> bool | None:
    met = [
        value <= goal
        for value, goal in ((best.ttft_p50_ms, case.max_ttft_ms), (best.router_cpu_ms, case.max_cpu_ms))
        if goal is not None
    ]
    return all(met) if met else None


if __name__ == "__main__":
    main()
