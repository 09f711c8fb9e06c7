"""What a batch beside them costs interactive requests, and how far it gets meanwhile.

    python -m benchmarks.batch_beside [--lines 50000] [--rate 20] [--seconds 30] [--rounds 2] [--json FILE]

A router and two mock workers, whose steps take as long as those of an 8B model on one H200. Requests come at random
times, `--rate` a second; each round has them without and with a batch of completions of another file beside. The batch
is cancelled after its turn. Prompts of both have 100 to 1,000 tokens, answers 32 to 96. Reported are medians of the
rounds.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

from baton.bench.measured import Point
from baton.bench.open_ai import Endpoint, Wishes
from baton.bench.sweep import Sweep
from baton.bench.workload import Amount
from baton.service.supervisor import Supervisor
from benchmarks.machine import describe, write_result
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig
from runtime.telemetry.logging import configure_logging

PROMPT, OUTPUT = (100, 1000), (32, 96)
WISHES = Wishes(model="mock", chat=False, temperature=0.0, ignore_eos=True, timeout_s=120.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    alone, beside, lines_per_s = asyncio.run(_measure(options))
    table = Table(title=f"{options.rate:g} requests a second, {options.lines} lines beside them")
    for column in ("p99, ms", "without", "with", "ratio"):
        table.add_column(column, justify="right")
    ratios = {}
    for name in ("ttft_ms", "itl_ms", "request_ms"):
        before, after = (statistics.median(getattr(point, name).p99 for point in each) for each in (alone, beside))
        ratios[name] = after / before
        table.add_row(name.removesuffix("_ms"), f"{before:.1f}", f"{after:.1f}", f"{ratios[name]:.2f}")
    console = Console()
    console.print(table)
    console.print(f"the batch: {lines_per_s:.1f} lines a second")
    if options.json:
        points = {"alone": msgspec.to_builtins(alone), "beside": msgspec.to_builtins(beside)}
        settings = {"rate": options.rate, "lines": options.lines, "seconds": options.seconds}
        write_result(options.json, {**describe(), **settings, "lines_per_s": lines_per_s, "ratios": ratios, **points})


async def _measure(options: argparse.Namespace) -> tuple[list[Point], list[Point], float]:
    """What was measured without and with a batch, and lines of the batch per second."""
    alone, beside, rates = [], [], []
    with tempfile.TemporaryDirectory(prefix="baton-batch-") as folder:
        overrides = {
            "model": "mock",
            "workers": {"prefill": 0, "decode": 2},
            "router": {"http_port": 0, "grpc_port": 0, "batch_folder": f"{folder}/batches"},
            "mock": {"answer_tokens": 4096},
        }
        config = with_overrides(ServingConfig(), overrides, "benchmark")
        configure_logging(config.logging, "benchmark")
        async with Supervisor(config, Path(folder)) as service, aiohttp.ClientSession() as http:
            address = f"http://{service.address('http')}"
            for number in range(options.rounds):
                alone.append(await _load(address, options, 2 * number))
                batch = await _begin(http, address, options.lines, number)
                beside.append(await _load(address, options, 2 * number + 1))
                async with http.post(f"{address}/v1/batches/{batch}/cancel") as answer:
                    answer.raise_for_status()
                ended = await _until_ended(http, address, batch)
                rates.append(ended["request_counts"]["completed"] / beside[-1].seconds)
    return alone, beside, statistics.median(rates)


async def _load(address: str, options: argparse.Namespace, seed: int) -> Point:
    amount = Amount(int(options.rate * options.seconds), PROMPT, OUTPUT, seed)
    sweep = Sweep(amount, rates=(options.rate,))
    _, (point,) = await sweep.run(Endpoint(address, None, None), WISHES, lambda name, number: lambda: None)
    if point.failed:
        raise SystemExit(f"{point.failed} requests failed: {point.problem}")
    return point


async def _begin(http: aiohttp.ClientSession, address: str, num_lines: int, seed: int) -> str:
    """The id of a batch that works."""
    dice = random.Random(seed)
    lines = []
    for number in range(num_lines):
        text = f"{number} " + "some words of a prompt " * (dice.randint(*PROMPT) // 23)  # a byte is a token
        body = {"prompt": text, "max_tokens": dice.randint(*OUTPUT), "ignore_eos": True, "temperature": 0}
        asked = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(msgspec.json.encode(asked))
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", b"\n".join(lines), filename="lines.jsonl")
    async with http.post(f"{address}/v1/files", data=form) as answer:
        answer.raise_for_status()
        file = await answer.json()
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    async with http.post(f"{address}/v1/batches", json=wanted) as answer:
        answer.raise_for_status()
        batch = str((await answer.json())["id"])
    while (await _seen(http, address, batch))["status"] == "validating":
        await asyncio.sleep(0.1)
    return batch


async def _until_ended(http: aiohttp.ClientSession, address: str, batch: str) -> dict[str, Any]:
    while (seen := await _seen(http, address, batch))["status"] in ("in_progress", "cancelling"):
        await asyncio.sleep(0.1)
    return seen


async def _seen(http: aiohttp.ClientSession, address: str, batch: str) -> dict[str, Any]:
    async with http.get(f"{address}/v1/batches/{batch}") as answer:
        answer.raise_for_status()
        seen: dict[str, Any] = await answer.json()
        return seen


if __name__ == "__main__":
    main()
