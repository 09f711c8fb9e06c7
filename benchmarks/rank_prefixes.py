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
import random
from dataclasses import dataclass, field
from statistics import mean
from typing import Final

import aiohttp
import msgspec
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from benchmarks.running_server import ask, both_ways, parser_of, write_rounds

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


async def found_tokens(session: aiohttp.ClientSession, server: str) -> int:
    async with session.get(f"{server}/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    samples = (sample for family in families for sample in family.samples if sample.name == FOUND)
    return int(sum(sample.value for sample in samples))


async def measure(options: argparse.Namespace) -> dict[str, list[Round]]:
    rounds: dict[str, list[Round]] = {"Baton": [], "alone": []}
    # A server closes a connection that has idled for 5 s, maybe just when a turn begins.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with both_ways(options) as addresses, aiohttp.ClientSession(connector=connector) as session:
        for number in range(options.rounds + 1):  # the first one warms up
            for at, (name, address) in enumerate(addresses.items()):
                done = await one_round(session, address, options, 2 * (options.seed + number) + at)
                rounds[name] += [done] if number else []
    return rounds


def main() -> None:
    counts = (
        ("agents", 16, "in a round"),
        ("kinds", 4, "of agents, each with a system message"),
        ("turns", 6, "of an agent"),
        ("shared", 1024, "tokens of a system message"),
        ("told", 256, "tokens that a turn adds"),
        ("answer", 16, "tokens of an answer"),
    )
    parser = parser_of(__doc__, counts)
    parser.add_argument("--vocabulary", type=int, nargs=2, default=(1000, 30_000), help="token ids of prompts")
    parser.add_argument("--think-s", type=float, default=1.0, help="between two turns of an agent, on average")
    parser.add_argument("--apart-s", type=float, default=0.5, help="between the first turns of two agents")
    options = parser.parse_args()
    rounds = asyncio.run(measure(options))
    table = Table(title=f"{options.agents} agents, {options.turns} turns: what was found of what could be")
    for column in ("", "found", "findable tokens", "first token, ms"):
        table.add_column(column, justify="right")
    for name, done in rounds.items():
        for one in done:
            table.add_row(name, f"{one.share:.1%}", f"{one.findable_tokens:,}", f"{one.first_ms:.0f}")
    Console(width=100).print(table)
    write_rounds(options, msgspec.to_builtins(rounds))


if __name__ == "__main__":
    main()
