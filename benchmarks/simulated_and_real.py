"""The same traffic simulated and on real processes: does the simulator behind `baton advise` tell the truth?

    python -m benchmarks.simulated_and_real [--rates 2.4,4.8] [--requests 400] [--fleets 8,4+4] [--slower 20]

Real: router, NATS and workers with the mock engine, each worker a process, whose steps last as the formula says,
`--slower` times as long, so that a busy machine's own milliseconds weigh little; the targets are as many times wider.
Fleets: `8` mixed workers, `4+4` prefill and decode workers. Simulated: the same arrivals and lengths in
simulator/stepwise. Prompts are random token ids, so that nothing is cached. Goal: mean TTFT within 10 % at each rate.
Exit code 1 when it is missed.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import numpy as np
import structlog
from msgspec import Struct, structs
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from baton.service.supervisor import Supervisor
from baton_proto.generated import inference_pb2 as pb
from benchmarks.routing.report import machine, write_results
from engine.runners.mock_runner import MockRunner
from router.placement.weights import Weights
from runtime.calls.router import Client
from runtime.config.overrides import with_overrides
from runtime.config.planner import TargetsConfig
from runtime.config.serving import ServingConfig
from runtime.config.step_times import StepTimes
from simulator.advice.traffic import RandomTraffic
from simulator.requests import Requests
from simulator.stepwise.fleet import Layout, WorkerKind, simulate

PROMPT, OUTPUT = (100, 2000), (20, 120)
MAX_RUNNING = 256
GOAL = 0.1
TIMEOUT_S = 600.0


class Row(Struct, frozen=True):
    fleet: str
    rate: float
    requests: int
    real_ms: float  # mean TTFT
    simulated_ms: float
    real_p90_ms: float
    simulated_p90_ms: float

    @property
    def error(self) -> float:
        return self.simulated_ms / self.real_ms - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="2.4,4.8", help="requests/s")
    parser.add_argument("--requests", type=int, default=400, help="at each rate")
    parser.add_argument("--fleets", default="8,4+4")
    parser.add_argument("--slower", type=float, default=20.0, help="the mock engine's steps, so many times")
    parser.add_argument("--json", type=Path, help="also write the rows there, with the machine and the command")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    began, cells = machine(), product(options.fleets.split(","), map(float, options.rates.split(",")))
    terminal = Console(stderr=True)
    rows = []
    for fleet, rate in cells:
        rows.append(row := asyncio.run(_compared(fleet, rate, options.requests, options.slower)))
        terminal.print(f"{fleet} at {rate:g}: {row.error:+.1%}")
    table = Table("fleet", "requests/s", "real ms", "simulated ms", "error", "real P90", "simulated P90")
    for row in rows:
        times = (f"{row.real_ms:.1f}", f"{row.simulated_ms:.1f}", f"{row.error:+.1%}")
        table.add_row(row.fleet, f"{row.rate:g}", *times, f"{row.real_p90_ms:.0f}", f"{row.simulated_p90_ms:.0f}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if options.json:
        write_results(options.json, "simulated_and_real", began, {"rows": rows})
    missed = [f"{row.fleet} at {row.rate:g}" for row in rows if abs(row.error) > GOAL]
    sys.exit(f"goal missed: {', '.join(missed)}" if missed else 0)


async def _compared(fleet: str, rate: float, count: int, slower: float) -> Row:
    prefill, decode = (int(part) for part in (fleet if "+" in fleet else f"0+{fleet}").split("+"))
    requests = RandomTraffic(PROMPT, OUTPUT, count).requests(rate, 0)
    times, targets = StepTimes().faster(1 / slower), TargetsConfig(1000 * slower, 50 * slower)
    config = with_overrides(
        ServingConfig(model="mock"),
        {
            "router": {"http_port": 0, "grpc_port": 0, "queue_limit": count},
            "workers": {"prefill": prefill, "decode": decode, "per_process": 1},
            "engine": {"max_running": MAX_RUNNING},
            "planner": {"targets": structs.asdict(targets)},
            "step_times": structs.asdict(times),
            "logging": {"level": "error"},
        },
        "benchmark",
    )
    kv_tokens = config.mock.kv_blocks * config.engine.block_size
    kind = WorkerKind(times, 1, kv_tokens, MAX_RUNNING, ahead=MockRunner.depth)
    layout = Layout(prefill, kind, decode, kind)
    simulated = simulate(layout, requests, Weights.of(config.router.placement), targets).ttft_ms
    real = await _real(config, requests)
    p90 = float(np.percentile(real, 90)), float(np.percentile(simulated, 90))
    return Row(fleet, rate, count, float(real.mean()), float(simulated.mean()), *p90)


async def _real(config: ServingConfig, requests: Requests) -> NDArray[np.float64]:
    """The TTFT of each request in ms."""
    dice = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as logs:
        supervisor = Supervisor(config, log_dir=Path(logs))
        try:
            await supervisor.start()
            async with Client(supervisor.address("grpc")) as client:

                async def ttft_ms(at_s: float, prompt: int, output: int) -> float:
                    ids = dice.integers(3, 250, prompt).tolist()
                    options = pb.SamplingOptions(max_tokens=output, temperature=1.0, ignore_eos=True)
                    request = pb.GenerateRequest(tokens=pb.TokenIds(ids=ids), sampling=options)
                    await asyncio.sleep(max(0.0, begin_s + at_s - time.perf_counter()))
                    asked_s, first_s = time.perf_counter(), 0.0

                    def on_piece(piece: pb.Piece) -> None:
                        nonlocal first_s
                        if piece.token_ids and not first_s:
                            first_s = time.perf_counter()

                    await client.generate(request, TIMEOUT_S, on_piece)
                    return (first_s - asked_s) * 1e3

                begin_s = time.perf_counter() + 1.0
                columns = (requests.arrival_s.tolist(), requests.prompt.tolist(), requests.output.tolist())
                return np.array(await asyncio.gather(*(ttft_ms(*row) for row in zip(*columns, strict=True))))
        finally:
            await supervisor.stop()


if __name__ == "__main__":
    main()
