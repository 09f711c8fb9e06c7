"""What traces cost the service's throughput: services that differ in `telemetry.traces` alone take turns.

    python -m benchmarks.trace_cost [--cases 2,8] [--seconds 2] [--rounds 15] [--json FILE]
    python -m benchmarks.frontend_load --list    # numbers the cases

Each service is a router and mock workers whose steps take no time, as in `frontend_load`, with the same requests in the
same order. A round gives each service its turn, in an order that moves on by one from round to round. A ratio is that
to the mean of the two services without traces in the same round, and the table has the median of the rounds: the ratios
of those two say how far from 1 a ratio comes by itself. The collector is a process that reads and discards;
it runs on the same cores, which no collector of a real service does. Goal at a share of 0.1: 0.97. Exit code 1 when it
is missed.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich.console import Console
from rich.progress import track
from rich.table import Table

from baton.service.launches import ROUTER_ID
from baton.service.supervisor import Supervisor
from benchmarks.frontend.cases import CASES, Case, bodies
from benchmarks.frontend.load_client import Load
from benchmarks.frontend.report import Round
from benchmarks.frontend_load import WARM_UP_S, Target, chosen, cpu_s, round_of, run_load, service_config
from benchmarks.machine import describe, write_result
from router.text.tokenizer import Tokenizer
from runtime.checkpoint.served_model import served_model
from runtime.config.overrides import with_overrides
from runtime.telemetry.logging import configure_logging

SERVICES: dict[str, float | None] = {"off": None, "off again": None, "sample 0.1": 0.1, "sample 1.0": 1.0}
GOAL = 0.97  # of the requests/s without traces
GOAL_OF = "sample 0.1"


@dataclass(frozen=True, slots=True)
class Cost:
    service: str
    requests_per_s: float  # median of the rounds, as the next two
    ratio: float
    cpu_ratio: float  # the router's CPU per request to that without traces
    rounds: list[Round]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=chosen, default=[CASES[1], CASES[7]], help="numbers of frontend_load's list")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console, missed, documents = Console(), [], []
    for case in options.cases:
        with _collector() as (endpoint, received):
            costs = asyncio.run(_measure(case, endpoint, options.seconds, options.rounds))
            megabytes = received() / 1e6
        table = Table(title=f"{case.name}; the collector got {megabytes:.1f} MB")
        for column in ("traces", "requests/s", "of off", "router CPU per request, of off"):
            table.add_column(column, justify="right")
        for cost in costs:
            table.add_row(cost.service, f"{cost.requests_per_s:.0f}", f"{cost.ratio:.3f}", f"{cost.cpu_ratio:.3f}")
            if cost.service == GOAL_OF and cost.ratio < GOAL:
                missed.append(case.name)
        console.print(table)
        documents.append({"case": case.name, "collected_mb": megabytes, "services": msgspec.to_builtins(costs)})
    if options.json:
        write_result(options.json, {**describe(), "seconds": options.seconds, "goal": GOAL, "cases": documents})
    sys.exit(f"goal missed: {', '.join(missed)}" if missed else 0)


async def _measure(case: Case, endpoint: str, seconds: float, rounds: int) -> list[Cost]:
    plain = service_config("smollm2", case.prefill, case.decode)
    configure_logging(plain.logging, "benchmark")
    files = served_model(plain)
    requests = bodies(case, Tokenizer(files.folder, files.config.vocab_size), seed=len(case.name))
    done: dict[str, list[Round]] = {name: [] for name in SERVICES}
    async with AsyncExitStack() as stack:
        turns: list[tuple[str, Target, Load]] = []
        for name, share in SERVICES.items():
            traces: dict[str, Any] = {"enabled": share is not None, "endpoint": endpoint, "sample": share}
            config = with_overrides(plain, {"telemetry": {"traces": traces}}, "benchmark")
            log_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-traces-"))
            service = await stack.enter_async_context(Supervisor(config, Path(log_dir)))
            target = Target(service.address("http"), psutil.Process(service.children[ROUTER_ID].pid))
            turns.append((name, target, Load(target.address, requests.path, iter(requests))))
            await run_load(turns[-1][2], case.concurrency, WARM_UP_S)
        for number in track(range(rounds), case.name, console=Console(stderr=True), transient=True):
            first = number % len(turns)
            for name, target, load in turns[first:] + turns[:first]:
                before_s = cpu_s(target.process)
                measured = await run_load(load, case.concurrency, seconds)
                done[name].append(round_of(measured, cpu_s(target.process) - before_s))
    return [_cost(name, done) for name in SERVICES]


def _cost(service: str, done: dict[str, list[Round]]) -> Cost:
    def ratio(figure: str) -> float:
        plain = [done[name] for name, share in SERVICES.items() if share is None]
        return statistics.median(
            getattr(one, figure) / statistics.mean(getattr(other, figure) for other in without)
            for one, without in zip(done[service], zip(*plain, strict=True), strict=True)
        )

    rate = statistics.median(one.requests_per_s for one in done[service])
    return Cost(service, rate, ratio("requests_per_s"), ratio("router_cpu_ms"), done[service])


@contextmanager
def _collector() -> Iterator[tuple[str, Any]]:
    """The address of a collector, and a function that says how many bytes it has got."""
    spawned = multiprocessing.get_context("spawn")
    ours, theirs = spawned.Pipe()
    process = spawned.Process(target=_collect, args=(theirs,), daemon=True)
    process.start()
    port = ours.recv()

    def received() -> int:
        ours.send("how many bytes?")
        return int(ours.recv())

    try:
        yield f"http://127.0.0.1:{port}/v1/traces", received
    finally:
        process.terminate()
        process.join()


def _collect(pipe: Connection) -> None:
    received = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            nonlocal received
            received += len(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    pipe.send(server.server_port)

    threading.Thread(target=server.serve_forever, daemon=True).start()
    while pipe.recv():
        pipe.send(received)


if __name__ == "__main__":
    main()
