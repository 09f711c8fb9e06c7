"""What traces cost the router: one service, whose requests say by turns whether they are sampled.

    python -m benchmarks.trace_cost [--cases 2,8] [--seconds 4] [--rounds 15] [--json FILE]
    python -m benchmarks.frontend_load --list    # numbers the cases

The service is a router and mock workers whose steps take no time, as in `frontend_load`, with traces on and a share of
0: a request is sampled when its caller says so. A round has a turn for each share of sampled requests, in an order that
moves on by one from round to round. After a turn its spans leave, and their CPU counts towards it. A ratio is that to
the mean of the two turns without samples in the same round, and the table has the median of the rounds: the ratios of
those two say how far from 1 a ratio comes by itself. Two services would differ by more than what is measured, because
one process keeps being quicker than the other. The collector is a process that reads and discards; it runs on the same
cores, which no collector of a real service does. Goal at a share of 0.1: 1.03 times the router's CPU per request. Exit
code 1 when it is missed.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from baton.service.supervisor import Supervisor
from benchmarks.frontend.cases import CASES, Case, bodies
from benchmarks.frontend.load_client import Load
from benchmarks.frontend.report import Round
from benchmarks.frontend_load import WARM_UP_S, chosen, round_of, run_load, service_config
from benchmarks.machine import describe, process_cpu_us, write_result
from router.text.tokenizer import Tokenizer
from runtime.checkpoint.served_model import served_model
from runtime.telemetry.logging import configure_logging

EVERY: dict[str, int] = {"off": 0, "off again": 0, "sample 0.1": 10, "sample 1.0": 1}
"""Turn -> of how many requests one is sampled; 0: none is."""
GOAL = 1.03  # of the router's CPU per request without samples
GOAL_OF = "sample 0.1"
EXPORT_MS = 2000  # how long a span waits for others; an export costs by itself, and the default is 5,000
SETTLE_S = 2.5  # after a turn


@dataclass(frozen=True, slots=True)
class Cost:
    turn: str
    requests_per_s: float  # median of the rounds, as the next two
    ratio: float
    cpu_ratio: float  # the router's CPU per request to that without samples
    rounds: list[Round]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=chosen, default=[CASES[1], CASES[7]], help="numbers of frontend_load's list")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn")
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
            table.add_row(cost.turn, f"{cost.requests_per_s:.0f}", f"{cost.ratio:.3f}", f"{cost.cpu_ratio:.3f}")
            if cost.turn == GOAL_OF and cost.cpu_ratio > GOAL:
                missed.append(case.name)
        console.print(table)
        documents.append({"case": case.name, "collected_mb": megabytes, "turns": msgspec.to_builtins(costs)})
    if options.json:
        write_result(options.json, {**describe(), "seconds": options.seconds, "goal": GOAL, "cases": documents})
    sys.exit(f"goal missed: {', '.join(missed)}" if missed else 0)


async def _measure(case: Case, endpoint: str, seconds: float, rounds: int) -> list[Cost]:
    os.environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = endpoint
    os.environ |= {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}
    config = service_config("smollm2", case.prefill, case.decode)
    configure_logging(config.logging, "benchmark")
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = str(EXPORT_MS)
    files = served_model(config)
    requests = bodies(case, Tokenizer(files.folder, files.config.vocab_size), seed=len(case.name))
    done: dict[str, list[Round]] = {name: [] for name in EVERY}
    with tempfile.TemporaryDirectory(prefix="baton-traces-") as log_dir:
        async with Supervisor(config, Path(log_dir)) as service:
            router = service.children["router-1"].pid
            address = service.address("http")
            turns = [(name, _Load(address, requests.path, iter(requests), every)) for name, every in EVERY.items()]
            for _, load in turns:
                await run_load(load, case.concurrency, WARM_UP_S)
            for number in track(range(rounds), case.name, console=Console(stderr=True), transient=True):
                first = number % len(turns)
                for name, load in turns[first:] + turns[:first]:
                    before_us = process_cpu_us(router)
                    measured = await run_load(load, case.concurrency, seconds)
                    await asyncio.sleep(SETTLE_S)
                    done[name].append(round_of(measured, (process_cpu_us(router) - before_us) / 1e6))
    return [_cost(name, done) for name in EVERY]


class _Load(Load):
    """A load in which one of every so many requests says that it is sampled."""

    def __init__(self, address: str, path: str, bodies: Iterator[bytes], every: int) -> None:
        super().__init__(address, path, bodies)
        self._every = every
        self._count = 0

    def next_request(self) -> bytes:
        request = super().next_request()
        self._count += 1
        if not self._every or self._count % self._every:
            return request
        parent = b"traceparent: 00-%032x-%016x-01\r\n" % (self._count, self._count)
        line, _, rest = request.partition(b"\r\n")
        return line + b"\r\n" + parent + rest


def _cost(turn: str, done: dict[str, list[Round]]) -> Cost:
    def ratio(figure: str) -> float:
        plain = [done[name] for name, every in EVERY.items() if not every]
        return statistics.median(
            getattr(one, figure) / statistics.mean(getattr(other, figure) for other in without)
            for one, without in zip(done[turn], zip(*plain, strict=True), strict=True)
        )

    rate = statistics.median(one.requests_per_s for one in done[turn])
    return Cost(turn, rate, ratio("requests_per_s"), ratio("router_cpu_ms"), done[turn])


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
