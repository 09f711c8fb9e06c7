"""How much of what the ranks of a vLLM server have cached is found: through Baton, and by the server's own balancing.

    vllm serve MODEL --data-parallel-size 2 --block-size 32 --kv-events-config ...   # as docs/vllm.md says; idle
    python -m benchmarks.rank_prefixes --model MODEL --server http://127.0.0.1:8100 \\
        --events tcp://127.0.0.1:5550 --replay tcp://127.0.0.1:5560

Agents of several kinds ask turn after turn: a prompt is the kind's system message and all that the agent has been told
so far. A token can be found when a whole block up to it was a part of a prompt that was answered before; how many were
found the server's own metrics say. Each round has fresh prompts; those through Baton and those without it take turns.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, Final

import aiohttp
import msgspec
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from baton.service.supervisor import Supervisor
from benchmarks.machine import describe, write_result
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig
from runtime.telemetry.logging import configure_logging

FOUND: Final = "vllm:prefix_cache_hits_total"
SETTLE_S: Final = 2.0  # for the last events of a round


class Round(Struct, frozen=True):
    findable_tokens: int
    found_tokens: int
    first_ms: float  # mean

    @property
    def share(self) -> float:
        return self.found_tokens / max(1, self.findable_tokens)


@dataclass(slots=True)
class Answered:
    """What was a part of answered prompts: `blocks` are prompts cut at the ends of blocks."""

    block_size: int
    blocks: set[tuple[int, ...]] = field(default_factory=set)

    def findable(self, prompt: list[int]) -> int:
        """The last token of a prompt is computed in any case."""
        ends = range(self.block_size, len(prompt), self.block_size)
        return max((end for end in ends if tuple(prompt[:end]) in self.blocks), default=0)

    def add(self, prompt: list[int]) -> None:
        ends = range(self.block_size, len(prompt) + 1, self.block_size)
        self.blocks.update(tuple(prompt[:end]) for end in ends)


async def one_round(session: aiohttp.ClientSession, address: str, options: argparse.Namespace, number: int) -> Round:
    chance = random.Random(number)
    answered = Answered(options.block_size)
    findable: list[int] = []
    first_ms: list[float] = []

    def tokens(count: int) -> list[int]:
        return [chance.randrange(*options.vocabulary) for _ in range(count)]

    async def agent(begins_s: float, history: list[int], turns: list[tuple[list[int], float]]) -> None:
        await asyncio.sleep(begins_s)
        for told, think_s in turns:
            history = history + told
            findable.append(answered.findable(history))
            first_ms.append(await ask(session, address, options, history))
            answered.add(history)
            await asyncio.sleep(think_s)

    kinds = [tokens(options.shared) for _ in range(options.kinds)]
    agents = []
    for at in range(options.agents):
        turns = [(tokens(options.told), chance.expovariate(1 / options.think_s)) for _ in range(options.turns)]
        agents.append(agent(at * options.apart_s, kinds[at % len(kinds)], turns))
    before = await found_tokens(session, options.server)
    await asyncio.gather(*agents)
    await asyncio.sleep(SETTLE_S)
    return Round(sum(findable), await found_tokens(session, options.server) - before, mean(first_ms))


async def ask(session: aiohttp.ClientSession, address: str, options: argparse.Namespace, prompt: list[int]) -> float:
    """Milliseconds until the first token. Returns when the answer has ended."""
    body = {"model": options.model, "prompt": prompt, "max_tokens": options.answer, "temperature": 0}
    began_s, first_s = time.perf_counter(), 0.0
    async with session.post(f"{address}/v1/completions", json=body | {"stream": True, "ignore_eos": True}) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not first_s and line.startswith(b"data: "):
                first_s = time.perf_counter()
    return (first_s - began_s) * 1e3


async def found_tokens(session: aiohttp.ClientSession, server: str) -> int:
    async with session.get(f"{server}/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    samples = (sample for family in families for sample in family.samples if sample.name == FOUND)
    return int(sum(sample.value for sample in samples))


def front(options: argparse.Namespace) -> ServingConfig:
    """Baton before a server that runs."""
    told = {"name": "server", "address": options.server, "events": options.events, "replay": options.replay}
    overrides: dict[str, Any] = {
        "model": options.folder or options.model,
        "served_model_name": options.model,
        "workers": {"prefill": 0, "decode": 0, "ready_timeout_s": 300},
        "engine": {"block_size": options.block_size},
        "external_workers": [told],
        "router": {"http_port": 0, "grpc_port": 0},
    }
    return with_overrides(ServingConfig(), overrides, "benchmark")


async def measure(options: argparse.Namespace) -> dict[str, list[Round]]:
    config = front(options)
    configure_logging(config.logging, "benchmark")
    rounds: dict[str, list[Round]] = {"Baton": [], "alone": []}
    with tempfile.TemporaryDirectory(prefix="baton-ranks-") as logs:
        async with Supervisor(config, Path(logs)) as service, aiohttp.ClientSession() as session:
            addresses = {"Baton": f"http://{service.address('http')}", "alone": options.server}
            for number in range(options.rounds + 1):  # the first one warms up
                for at, (name, address) in enumerate(addresses.items()):
                    done = await one_round(session, address, options, 2 * (options.seed + number) + at)
                    rounds[name] += [done] if number else []
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="as the server names it")
    parser.add_argument("--folder", help="where its tokenizer is, if --model does not say")
    for name in ("server", "events", "replay"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, nargs=2, default=(1000, 30_000), help="token ids of prompts")
    for name, count, text in (
        ("agents", 16, "in a round"),
        ("kinds", 4, "of agents, each with a system message"),
        ("turns", 6, "of an agent"),
        ("shared", 1024, "tokens of a system message"),
        ("told", 256, "tokens that a turn adds"),
        ("answer", 16, "tokens of an answer"),
        ("rounds", 3, ""),
        ("seed", 0, ""),
    ):
        parser.add_argument(f"--{name}", type=int, default=count, help=text)
    parser.add_argument("--think-s", type=float, default=1.0, help="between two turns of an agent, on average")
    parser.add_argument("--apart-s", type=float, default=0.5, help="between the first turns of two agents")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds = asyncio.run(measure(options))
    table = Table(title=f"{options.agents} agents, {options.turns} turns: what was found of what could be")
    for column in ("", "found", "findable tokens", "first token, ms"):
        table.add_column(column, justify="right")
    for name, done in rounds.items():
        for one in done:
            table.add_row(name, f"{one.share:.1%}", f"{one.findable_tokens:,}", f"{one.first_ms:.0f}")
    Console(width=100).print(table)
    if options.json:
        facts = {name: value for name, value in vars(options).items() if name != "json"}
        write_result(
            options.json, {**describe(), **json.loads(json.dumps(facts)), "rounds": msgspec.to_builtins(rounds)}
        )


if __name__ == "__main__":
    main()
