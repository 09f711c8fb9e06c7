"""What a flood of requests for one model costs the callers of another one behind the same service.

    python -m benchmarks.models_fairness [--seconds 20] [--rounds 3] [--rate 10] [--callers 200] [--json FILE]

A service with two models of the mock engine, one worker each, whose steps take 50 ms. Model `calm` gets requests at a
rate. In every other turn `--callers` callers ask model `flooded` without a pause: more than its worker runs and its
share of router.queue_limit holds. They come back when they are told to. The flood is a process of its own; router,
workers and both loads share the cores of the machine. A router is one process, whose CPU the models do not divide, so
the figure is of use on a machine that has nothing else to do; the load at the end is told. Goal: the 99th percentile of
calm's time to its first token is at most 1.5 times that of the turns without a flood, in the median of the rounds. Exit
code 1 when it is missed.
"""

import argparse
import asyncio
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np
from msgspec import Struct, to_builtins
from rich.console import Console
from rich.progress import track
from rich.table import Table

from baton.service.supervisor import Supervisor
from baton_proto.generated import inference_pb2 as pb
from benchmarks.machine import describe, write_result
from runtime.calls.router import Client
from runtime.config.serving import parse_config
from runtime.telemetry.logging import configure_logging

GOAL = 1.5
CALM, FLOODED = "calm", "flooded"
TOKENS = 32
QUEUE_LIMIT = 256
SETTLE_S = 3.0
PER_CONNECTION = 50  # callers: a connection has a limit of its own
SETTINGS: dict[str, Any] = {
    "models": [{"name": name, "model": "mock"} for name in (CALM, FLOODED)],
    "workers": {"prefill": 0, "decode": 1},
    "router": {"http_port": 0, "grpc_port": 0, "queue_limit": QUEUE_LIMIT},
    "step_times": {"decode_floor_ms": 50.0},
    "logging": {"level": "warning"},
}


class Turn(Struct, frozen=True):
    flood: bool
    p50_ms: float  # of calm's time to its first token, as the next one
    p99_ms: float
    requests: int
    flooded: dict[str, int]  # outcomes of the flood, by gRPC's code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second for the calm model")
    parser.add_argument("--callers", type=int, default=200, help="of the flooded model")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    turns = asyncio.run(_measure(options.rounds, options.seconds, options.rate, options.callers))
    ratios = [turns[i + 1].p99_ms / turns[i].p99_ms for i in range(0, len(turns), 2)]
    table = Table(title=f"{CALM}: {options.rate:g} requests/s; {FLOODED}: {options.callers} callers at once")
    for column in ("flood", "TTFT p50 ms", "p99 ms", "requests", "the flood's outcomes"):
        table.add_column(column, justify="right")
    for turn in turns:
        outcomes = ", ".join(f"{count} {code}" for code, count in turn.flooded.items())
        table.add_row(str(turn.flood), f"{turn.p50_ms:.1f}", f"{turn.p99_ms:.1f}", str(turn.requests), outcomes)
    ratio = median(ratios)
    Console().print(table)
    Console().print(f"p99 with a flood: {ratio:.2f} of that without; goal {GOAL:g}; load {os.getloadavg()[0]:.1f}")
    if options.json is not None:
        head = {"benchmark": "models_fairness", **describe(), "goal": GOAL, "ratio": ratio, "rate": options.rate}
        write_result(options.json, {**head, "callers": options.callers, "turns": to_builtins(turns)})
    sys.exit(ratio > GOAL)


async def _measure(rounds: int, seconds: float, rate: float, callers: int) -> list[Turn]:
    config = parse_config(SETTINGS)
    configure_logging(config.logging, "models_fairness")
    with tempfile.TemporaryDirectory() as folder:
        async with Supervisor(config, log_dir=Path(folder)) as supervisor, supervisor.client() as client:
            address = supervisor.address("grpc")
            await _calm(client, 2.0, rate)  # warms up
            turns = []
            for _ in track(range(rounds), console=Console(stderr=True)):
                turns.append(_turn(await _calm(client, seconds, rate), {}))
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    flood = pool.apply_async(_flood, (address, callers, seconds + 2 * SETTLE_S))
                    await asyncio.sleep(SETTLE_S)
                    waits_s = await _calm(client, seconds, rate)
                    turns.append(_turn(waits_s, await asyncio.to_thread(flood.get)))
                await asyncio.sleep(SETTLE_S)
    return turns


def _turn(waits_s: list[float], flooded: dict[str, int]) -> Turn:
    p50, p99 = np.percentile(np.array(waits_s) * 1000, (50, 99)).tolist()
    return Turn(bool(flooded), p50, p99, len(waits_s), flooded)


async def _calm(client: Client, seconds: float, rate: float) -> list[float]:
    """The times to first tokens, of requests that come at even intervals."""

    async def ask(number: int) -> float:
        await asyncio.sleep(number / rate)
        return (await client.generate(_request(CALM, f"{number:06} "), 60)).ttft_s

    return list(await asyncio.gather(*map(ask, range(int(seconds * rate)))))


def _flood(address: str, callers: int, seconds: float) -> dict[str, int]:
    return asyncio.run(_flooding(address, callers, seconds))


async def _flooding(address: str, callers: int, seconds: float) -> dict[str, int]:
    outcomes: Counter[str] = Counter()

    async def ask_on(client: Client, caller: int) -> None:
        while True:
            try:
                await client.generate(_request(FLOODED, f"{caller:06} "), 120)
                outcomes[grpc.StatusCode.OK.name] += 1
            except grpc.aio.AioRpcError as error:
                outcomes[error.code().name] += 1
                told = dict(error.trailing_metadata() or ())
                await asyncio.sleep(float(str(told.get("retry-after-ms", 1000))) / 1000)

    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(address)) for _ in range(0, callers, PER_CONNECTION)]
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(ask_on(clients[one // PER_CONNECTION], one) for one in range(callers)))
    return dict(outcomes)


def _request(model: str, prompt: str) -> pb.GenerateRequest:
    sampling = pb.SamplingOptions(max_tokens=TOKENS, ignore_eos=True)
    return pb.GenerateRequest(model=model, text=prompt * 40, sampling=sampling)


if __name__ == "__main__":
    main()
