"""What a benchmark asks: nano-vllm's token ids, English text, or the requests of a trace."""

import functools
import gzip
import itertools
import pydoc_data.topics
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from runtime.errors import ConfigError

NANO_VLLM_IDS = 10_000  # the highest token id
TRACE_BLOCK = 512  # tokens that one hash id of a trace stands for
SEED_IDS = 1 << 40  # more than the hash ids of a trace


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: str
    output_tokens: int
    at_s: float = 0.0  # after the start, where arrivals are given


@dataclass(frozen=True, slots=True)
class Amount:
    """How many requests, and their lengths: least and most tokens, uniform between."""

    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    seed: int = 0


NANO_VLLM_BENCH = Amount(256, (100, 1024), (100, 1024))


class TraceLine(Struct, frozen=True):
    """A request as Mooncake's traces have it."""

    timestamp: int  # ms
    input_length: int
    output_length: int
    hash_ids: list[int] = []  # one per TRACE_BLOCK tokens: equal ids, equal text


def random_ids(amount: Amount, vocab_size: int) -> list[tuple[list[int], int]]:
    """(prompt, output tokens) each. With NANO_VLLM_BENCH and a vocabulary that has NANO_VLLM_IDS they are the requests
    of nano-vllm's bench.py, 133,966 tokens of output. https://github.com/GeeeekExplorer/nano-vllm/blob/main/bench.py"""
    dice = random.Random(amount.seed)
    prompts = [
        [dice.randint(0, NANO_VLLM_IDS) for _ in range(dice.randint(*amount.prompt))] for _ in range(amount.requests)
    ]
    return [([token % vocab_size for token in prompt], dice.randint(*amount.output)) for prompt in prompts]


def texts(amount: Amount, words_per_token: float) -> list[Ask]:
    """English prompts of about these lengths, each another one. What a model says to them is text as well, so that
    nearly every token shows; random token ids are answered with halves of characters."""
    dice = random.Random(amount.seed)
    return [
        Ask(_passage(dice.randint(*amount.prompt), words_per_token, dice), dice.randint(*amount.output))
        for _ in range(amount.requests)
    ]


def trace_lines(path: Path, limit: int | None = None) -> list[TraceLine]:
    """The first `limit` requests of a trace, which may be gzipped. Raises ConfigError."""
    lines: list[TraceLine] = []
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            lines.extend(msgspec.json.decode(line, type=TraceLine) for line in itertools.islice(file, limit))
    except (OSError, EOFError) as error:
        raise ConfigError("--trace", f"{path}: {getattr(error, 'strerror', None) or error}") from error
    except msgspec.DecodeError as error:
        raise ConfigError("--trace", f"{path}: line {len(lines) + 1}: {error}") from error
    if not lines:
        raise ConfigError("--trace", f"{path}: holds no request")
    return lines


def mean_rate(lines: Sequence[TraceLine], path: Path) -> float:
    """Requests per second from the first to the last one. Raises ConfigError when all have one timestamp."""
    times = [line.timestamp for line in lines]
    if max(times) == min(times):
        raise ConfigError("--trace", f"{path}: all requests have one timestamp, so that no rate is known")
    return len(times) * 1e3 / (max(times) - min(times))


def traced(lines: Sequence[TraceLine], speed: float, words_per_token: float, seed: int = 0) -> list[Ask]:
    """`speed` divides the trace's times. Another seed gives other texts, which share as much among themselves."""
    return [
        Ask(
            _text_of(row, number, words_per_token, seed * SEED_IDS),
            max(1, row.output_length),
            row.timestamp / 1e3 / speed,
        )
        for number, row in enumerate(lines)
    ]


def at_random(asks: Sequence[Ask], per_s: float, seed: int) -> list[Ask]:
    """The same requests as they come from many users: with exponential gaps."""
    dice, now_s, placed = random.Random(seed), 0.0, []
    for ask in asks:
        placed.append(Ask(ask.prompt, ask.output_tokens, now_s))
        now_s += dice.expovariate(per_s)
    return placed


def _text_of(row: TraceLine, number: int, words_per_token: float, first_id: int) -> str:
    if not row.hash_ids:
        return _passage(row.input_length, words_per_token, random.Random(-1 - number - first_id))
    lengths = [TRACE_BLOCK] * (len(row.hash_ids) - 1)
    lengths.append(row.input_length - sum(lengths))
    blocks = zip(row.hash_ids, lengths, strict=True)
    return " ".join(_passage(length, words_per_token, random.Random(first_id + hash_id)) for hash_id, length in blocks)


def _passage(num_tokens: int, words_per_token: float, dice: random.Random) -> str:
    words, length = _words(), max(1, round(num_tokens * words_per_token))
    start = dice.randrange(len(words))
    taken = words[start : start + length]
    while len(taken) < length:
        taken += words[: length - len(taken)]
    return " ".join(taken)


@functools.cache
def _words() -> list[str]:
    """65,000 words of the language reference that comes with Python."""
    return " ".join(pydoc_data.topics.topics.values()).split()
