"""What Baton's door over one running vLLM server costs: tokens per second, and time to the first token.

    vllm serve MODEL --block-size 32 --kv-events-config ...   # as docs/vllm.md says; idle
    python -m benchmarks.door --model MODEL --server http://127.0.0.1:8100 \\
        --events tcp://127.0.0.1:5550 --replay tcp://127.0.0.1:5560

The same clients ask through Baton and without it in turns, each time with fresh prompts of random token ids and with
answers of half to one and a half times `--output`, so that streams do not begin and end together. While so many streams
run, prompts come one after another whose first tokens are timed.
"""

import argparse
import asyncio
import random
from copy import copy
from statistics import median
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.running_server import ask, both_ways, parser_of, write_rounds
from benchmarks.serving_throughput import run_clients


async def one_round(address: str, options: argparse.Namespace, streams: int, dice: random.Random) -> dict[str, float]:
    """`tokens/s`, `TTFT p50` in ms, and `prompts`, whose first tokens that is the median of."""
    options.concurrency, options.requests = streams, streams * options.each
    load = asyncio.create_task(asyncio.to_thread(run_clients, "http", address.removeprefix("http://"), options))
    first_ms = []
    async with aiohttp.ClientSession() as session:
        while not load.done():
            prompt = [dice.randrange(1000, 30_000) for _ in range(options.prompt)]
            first_ms.append(await ask(session, address, options, prompt))
            await asyncio.wait([load], timeout=options.apart_s)
    return {"tokens/s": load.result(), "TTFT p50": median(first_ms), "prompts": len(first_ms)}


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    dice = random.Random(options.seed)
    rows: list[dict[str, Any]] = []
    async with both_ways(options) as addresses:
        for streams in options.streams:
            for number in range(options.rounds + 1):  # the first one warms up
                for name, address in list(addresses.items())[:: 1 if number % 2 else -1]:
                    done = await one_round(address, options, streams, dice)
                    rows += [{"streams": streams, "way": name, **done}] if number else []
                    print(rows[-1:], flush=True)
    return rows


def main() -> None:
    counts = (
        ("each", 3, "requests of a stream in a round"),
        ("prompt", 512, "tokens"),
        ("output", 256, "tokens, on average"),
        ("clients", 4, "processes"),
    )
    parser = parser_of(__doc__, counts)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256], help="at a time")
    parser.add_argument("--apart-s", type=float, default=0.1, help="between two prompts that are timed")
    options = parser.parse_args()
    options.answer, options.tokenizer, options.served = 1, True, options.model
    options.output = options.output // 2, options.output * 3 // 2
    rows = asyncio.run(measure(copy(options)))  # the clients keep account in it
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
    write_rounds(options, rows)


if __name__ == "__main__":
    main()
