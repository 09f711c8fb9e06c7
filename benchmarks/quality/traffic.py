"""Kinds of traffic that routing is judged by: two recorded traces, and generators with their parameters.

Rate 1 of a generated kind is about 60,000 prompt tokens a second. Because nothing may be tuned on what judges it, the
kinds are in two halves: placement is tuned on TUNED, and HELD_OUT is only measured.
"""

import csv
import gzip
import random
from bisect import bisect
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from benchmarks.quality.trace import TraceRequest, load_trace
from runtime.blocks.block_hash import sequence_hashes

TOKENS_PER_S: Final = 60_000  # of all prompts together, at rate 1
MAX_PROMPT: Final = 64_000

Segment = tuple[int, int]  # what it is, and its tokens: equal in every prompt in which it stands
Draft = tuple[list[Segment], int]  # a prompt and the tokens of its answer


class Agents(Struct, frozen=True):
    """Each of many agents calls again and again with its tool preamble and a history that grows by results."""

    preambles: int = 6
    preamble_tokens: int = 6144
    calls: tuple[int, int] = (4, 16)
    result_tokens: tuple[int, int] = (256, 2048)
    answer_tokens: tuple[int, int] = (30, 200)
    active: int = 60  # agents at a time; one of them, at random, calls next

    def drafts(self, dice: random.Random) -> Iterator[Draft]:
        agents: list[list[Segment]] = []
        left: list[int] = []
        for fresh in range(10**6, 10**9):
            if len(agents) < self.active:
                agents.append([(dice.randrange(self.preambles), self.preamble_tokens)])
                left.append(dice.randint(*self.calls))
            who = dice.randrange(len(agents))
            agents[who].append((fresh, dice.randint(*self.result_tokens)))
            yield list(agents[who]), dice.randint(*self.answer_tokens)
            left[who] -= 1
            if not left[who]:
                del agents[who], left[who]


class Retrieval(Struct, frozen=True):
    """Questions to some documents of a library, which stand in the prompt in changing order."""

    system_tokens: int = 512
    documents: int = 400
    exponent: float = 0.9  # of the documents' popularity (Zipf)
    document_tokens: int = 1536
    per_prompt: tuple[int, int] = (2, 6)
    question_tokens: tuple[int, int] = (32, 256)
    answer_tokens: tuple[int, int] = (50, 400)

    def drafts(self, dice: random.Random) -> Iterator[Draft]:
        popular = _zipf(self.documents, self.exponent)
        for fresh in range(10**6, 10**9):
            chosen = {popular(dice) for _ in range(dice.randint(*self.per_prompt))}
            found = [(1 + document, self.document_tokens) for document in sorted(chosen)]
            dice.shuffle(found)
            question = (fresh, dice.randint(*self.question_tokens))
            yield [(0, self.system_tokens), *found, question], dice.randint(*self.answer_tokens)


class Documents(Struct, frozen=True):
    """Several questions, soon after one another, to each of many long documents: half of all tokens come again."""

    open: int = 40  # documents at a time
    document_tokens: tuple[int, int] = (4_000, 40_000)
    questions: tuple[int, int] = (1, 4)
    question_tokens: tuple[int, int] = (32, 512)
    answer_tokens: tuple[int, int] = (30, 300)

    def drafts(self, dice: random.Random) -> Iterator[Draft]:
        pages: list[list[int]] = []  # document, its tokens, questions left
        for fresh in range(10**6, 10**9):
            if len(pages) < self.open:
                pages.append([10**9 + fresh, dice.randint(*self.document_tokens), dice.randint(*self.questions)])
            page = dice.choice(pages)
            yield (
                [(page[0], page[1]), (fresh, dice.randint(*self.question_tokens))],
                dice.randint(*self.answer_tokens),
            )
            page[2] -= 1
            if not page[2]:
                pages.remove(page)


class FewShot(Struct, frozen=True):
    """Templates full of examples, with a short input behind them and a short answer."""

    templates: int = 300
    exponent: float = 1.0
    template_tokens: tuple[int, int] = (1024, 8192)
    input_tokens: tuple[int, int] = (64, 512)
    answer_tokens: tuple[int, int] = (1, 60)

    def drafts(self, dice: random.Random) -> Iterator[Draft]:
        popular = _zipf(self.templates, self.exponent)
        sizes = [dice.randint(*self.template_tokens) for _ in range(self.templates)]
        for fresh in range(10**6, 10**9):
            template = popular(dice)
            prompt = [(template, sizes[template]), (fresh, dice.randint(*self.input_tokens))]
            yield prompt, dice.randint(*self.answer_tokens)


class SystemPrompts(Struct, frozen=True):
    """Single questions behind one of a few system prompts, the first of which is by far the most popular."""

    prompts: int = 20
    exponent: float = 1.6
    system_tokens: int = 3072
    question_tokens: tuple[int, int] = (64, 3000)
    answer_tokens: tuple[int, int] = (50, 600)

    def drafts(self, dice: random.Random) -> Iterator[Draft]:
        popular = _zipf(self.prompts, self.exponent)
        for fresh in range(10**6, 10**9):
            prompt = [(popular(dice), self.system_tokens), (fresh, dice.randint(*self.question_tokens))]
            yield prompt, dice.randint(*self.answer_tokens)


class BatchBesideChats(Struct, frozen=True):
    """Conversations, and long prompts of a batch job that nobody asks for again."""

    batch_share: float = 0.2  # of the requests
    batch_tokens: tuple[int, int] = (8_000, 32_000)
    batch_answer: tuple[int, int] = (200, 800)
    chats: int = 120  # at a time
    turns: tuple[int, int] = (2, 10)
    turn_tokens: tuple[int, int] = (128, 2048)
    answer_tokens: tuple[int, int] = (50, 500)
    system_tokens: int = 1024

    def drafts(self, dice: random.Random) -> Iterator[Draft]:
        chats = Agents(1, self.system_tokens, self.turns, self.turn_tokens, self.answer_tokens, self.chats).drafts(dice)
        for fresh in range(1, 10**6):
            if dice.random() < self.batch_share:
                yield [(10**10 + fresh, dice.randint(*self.batch_tokens))], dice.randint(*self.batch_answer)
            else:
                yield next(chats)


class Bursts(Struct, frozen=True):
    """Chats behind a shared prompt, of which every minute four times as many come as in between, for some seconds."""

    system: SystemPrompts = SystemPrompts(40, 0.8, 2048, (256, 6000), (50, 400))
    every_s: float = 60.0
    lasts_s: float = 10.0
    times: float = 4.0

    def drafts(self, dice: random.Random) -> Iterator[Draft]:
        return self.system.drafts(dice)

    def intensity(self, at_s: float) -> float:
        calm = self.every_s / (self.every_s + (self.times - 1) * self.lasts_s)
        return calm * (self.times if at_s % self.every_s < self.lasts_s else 1.0)


Generator = Agents | Retrieval | Documents | FewShot | SystemPrompts | BatchBesideChats | Bursts
GENERATORS: Final[dict[str, Generator]] = {
    "agents": Agents(),
    "retrieval": Retrieval(),
    "bursts": Bursts(),
    "documents": Documents(),
    "few shot": FewShot(),
    "system prompts": SystemPrompts(),
    "batch beside chats": BatchBesideChats(),
}
RECORDED: Final = {"conversation": "mooncake_conversation.jsonl.gz", "code": "azure_code_2023.csv.gz"}
TUNED: Final = ("conversation", "agents", "retrieval", "bursts")
HELD_OUT: Final = ("code", "documents", "few shot", "system prompts", "batch beside chats")
SEED: Final = 20  # of the generated traffic


def traffic(kind: str, folders: tuple[Path, ...], block_size: int, limit: int, seed: int = SEED) -> list[TraceRequest]:
    """The first requests of a kind, or of the trace in a file of that name: JSON lines as Mooncake's, with gzip."""
    if kind in GENERATORS:
        return generated(GENERATORS[kind], block_size, limit, seed)
    name = RECORDED.get(kind, kind)
    path = next((folder / name for folder in folders if (folder / name).exists()), None)
    if path is None:
        raise FileNotFoundError(f"{name} is in none of {', '.join(map(str, folders))}")
    return load_code(path, block_size, limit) if kind == "code" else load_trace(path, block_size, limit)


def generated(generator: Generator, block_size: int, limit: int, seed: int = SEED) -> list[TraceRequest]:
    """`limit` requests whose gaps are exponential, about a mean that gives TOKENS_PER_S."""
    dice = random.Random(seed)
    drafts = [draft for draft, _ in zip(generator.drafts(dice), range(limit), strict=False)]
    mean_s = sum(tokens for prompt, _ in drafts for _, tokens in prompt) / limit / TOKENS_PER_S
    intensity: Callable[[float], float] = getattr(generator, "intensity", lambda at_s: 1.0)
    requests, at_s = [], 0.0
    for number, (prompt, answer) in enumerate(drafts):
        at_s += dice.expovariate(intensity(at_s) / mean_s)
        requests.append(_request(number, at_s, prompt, answer, block_size))
    return requests


def load_code(path: Path, block_size: int, limit: int) -> list[TraceRequest]:
    """Azure's trace of code completion, in which no prompt shares anything with another."""
    with gzip.open(path, "rt") as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(limit), strict=False)]
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    return [
        _request(n, at_s - times[0], [(n, int(row["ContextTokens"]))], int(row["GeneratedTokens"]), block_size)
        for n, (at_s, row) in enumerate(zip(times, rows, strict=True))
    ]


def _request(number: int, at_s: float, prompt: list[Segment], answer: int, block_size: int) -> TraceRequest:
    """Segments begin with a block: all but the last are rounded down to whole blocks."""
    hashes: list[NDArray[np.uint64]] = []
    tokens = 0
    for place, (what, length) in enumerate(prompt):
        whole = length // block_size
        first = (what * 1_000_003 + 1) * 2**12 % 2**63
        hashes.append(_mixed(np.arange(first, first + whole, dtype=np.uint64)))
        tokens += length if place == len(prompt) - 1 else whole * block_size
    blocks = np.concatenate(hashes)
    return TraceRequest(number, at_s, max(1, tokens), max(1, answer), blocks, sequence_hashes(blocks), exact=True)


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64: hashes of blocks that have numbers instead of tokens."""
    with np.errstate(over="ignore"):
        mixed = numbers * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _zipf(count: int, exponent: float) -> Callable[[random.Random], int]:
    """Draws from [0, count); the k-th has a share of k to the power of -exponent."""
    shares = list(accumulate((place + 1) ** -exponent for place in range(count)))
    return lambda dice: bisect(shares, dice.uniform(0, shares[-1]))
