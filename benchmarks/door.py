"""What Baton's door over one running vLLM server costs: tokens per second, and time to the first token.

    vllm serve MODEL --block-size 32 --kv-events-config ...   # as docs/vllm.md says; idle
    python -m benchmarks.door --model MODEL --server http://127.0.0.1:8100 \\
        --events tcp://127.0.0.1:5550 --replay tcp://127.0.0.1:5560

The same clients ask through Baton and without it in turns, each time with fresh prompts of random token ids. While so
many streams run, prompts come one after another whose first tokens are timed.
"""

import argparse
import asyncio
import json
import random
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from baton.service.supervisor import Supervisor
from benchmarks.machine import describe, write_result
from benchmarks.rank_prefixes import ask, front
from benchmarks.serving_throughput import run_clients
from runtime.telemetry.logging import configure_logging


async def one_round(address: str, options: argparse.Namespace, streams: int, dice: random.Random) -> dict[str, float]:
    """`tokens/s`, and `TTFT p50` in ms."""
    options.concurrency, options.requests = streams, streams * options.each
    load = asyncio.create_task(asyncio.to_thread(run_clients, "http", address.removeprefix("http://"), options))
    first_ms = []
    async with aiohttp.ClientSession() as session:
        while not load.done():
            prompt = [dice.randrange(1000, 30_000) for _ in range(options.prompt)]
            first_ms.append(await ask(session, address, options, prompt))
            await asyncio.wait([load], timeout=options.apart_s)
    return {"tokens/s": load.result(), "TTFT p50": median(first_ms)}


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    config, dice = front(options), random.Random(options.seed)
    configure_logging(config.logging, "benchmark")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="baton-door-") as logs:
        async with Supervisor(config, Path(logs)) as service:
            addresses = {"Baton": f"http://{service.address('http')}", "alone": options.server}
            for streams in options.streams:
                for number in range(options.rounds + 1):  # the first one warms up
                    for name, address in list(addresses.items())[:: 1 if number % 2 else -1]:
                        done = await one_round(address, options, streams, dice)
                        rows += [{"streams": streams, "way": name, **done}] if number else []
                        print(rows[-1:], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="as the server names it")
    parser.add_argument("--folder", help="where its tokenizer is, if --model does not say")
    for name in ("server", "events", "replay"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256], help="at a time")
    for name, count, text in (
        ("block-size", 32, ""),
        ("each", 3, "requests of a stream in a round"),
        ("prompt", 512, "tokens"),
        ("output", 256, "tokens"),
        ("rounds", 3, ""),
        ("clients", 4, "processes"),
        ("seed", 0, ""),
    ):
        parser.add_argument(f"--{name}", type=int, default=count, help=text)
    parser.add_argument("--apart-s", type=float, default=0.1, help="between two prompts that are timed")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.answer, options.tokenizer, options.served = 1, True, options.model
    rows = asyncio.run(measure(options))
    table = Table(title="through Baton beside the server alone, medians")
    for column in ("streams", "tokens/s", "alone", "lost %", "TTFT p50, ms", "alone", "more"):
        table.add_column(column, justify="right")
    for streams in options.streams:

        def of(way: str, figure: str, streams: int = streams) -> float:
            return median(row[figure] for row in rows if (row["streams"], row["way"]) == (streams, way))

        (rate, alone), (ttft, ttft_alone) = ([of(w, f) for w in ("Baton", "alone")] for f in ("tokens/s", "TTFT p50"))
        speeds = f"{rate:,.0f}", f"{alone:,.0f}", f"{100 * (1 - rate / alone):.1f}"
        table.add_row(str(streams), *speeds, f"{ttft:.1f}", f"{ttft_alone:.1f}", f"{ttft - ttft_alone:.1f}")
    Console(width=100).print(table)
    if options.json:
        facts = {name: value for name, value in vars(options).items() if name != "json"}
        write_result(options.json, {**describe(), **json.loads(json.dumps(facts)), "rounds": rows})


if __name__ == "__main__":
    main()
