"""The cases of the load benchmark and their request bodies, which are prepared before the timing begins."""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from router.text.tokenizer import Tokenizer

NUM_PREFIXES = 16
PREFIX_SHARE = 0.75  # the shared prefix's share of a prompt
SUFFIX_POOL = 64
WORDS = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
]


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    kind: str  # "chat" | "tokens"
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    prefill: int = 0
    decode: int = 8
    max_ttft_ms: float | None = None  # goals
    max_cpu_ms: float | None = None  # the router's CPU per request
    dynamo: str = ""  # Dynamo's figures, see FACTS: requests/s, TTFT p50/p99 ms, CPU ms per request


CASES = (
    Case("chat 1k, 1 at a time", "chat", 1024, 16, 1, max_ttft_ms=2.0, max_cpu_ms=1.5, dynamo="520  1.35/5.5  1.5"),
    Case("chat 1k, 32", "chat", 1024, 16, 32, max_cpu_ms=1.5, dynamo="828  22/50  1.08"),
    Case("chat 1k, 128", "chat", 1024, 16, 128, max_cpu_ms=1.5, dynamo="1023  84/144  0.95"),
    Case("chat 8k, 8", "chat", 8192, 16, 8, dynamo="537  9.3/21  1.5"),
    Case("tokens 1k, 1", "tokens", 1024, 16, 1, max_ttft_ms=1.35, max_cpu_ms=1.1, dynamo="487  1.35/2.8  1.4"),
    Case("tokens 1k, 8", "tokens", 1024, 16, 8, max_cpu_ms=1.1, dynamo="737  6.7/13.9  1.1"),
    Case("chat 1k, 128 out, 8", "chat", 1024, 128, 8, max_cpu_ms=2.5, dynamo="204  17/37  4.5"),
    Case("4P + 4D, chat 1k, 32", "chat", 1024, 16, 32, prefill=4, decode=4, dynamo="393  74/109  2.9"),
)


@dataclass(frozen=True, slots=True)
class Bodies:
    """An endless series of requests of one case: a shared prefix, then a suffix that no other request has."""

    path: str
    heads: list[bytes]  # a body up to its suffix
    suffixes: list[bytes]
    number: Callable[[int], bytes]  # the number that makes a suffix unique
    tail: bytes

    def __iter__(self) -> Iterator[bytes]:
        for count in itertools.count():
            head, suffix = self.heads[count % len(self.heads)], self.suffixes[count % len(self.suffixes)]
            yield b"".join((head, self.number(count), suffix, self.tail))


def bodies(case: Case, tokenizer: Tokenizer, seed: int, model: str | None = None) -> Bodies:
    """The bodies of streaming requests over the OpenAI API. They name `model` where the server wants that."""
    dice = random.Random(seed)
    prefix_tokens = round(case.prompt_tokens * PREFIX_SHARE)
    suffix_tokens = case.prompt_tokens - prefix_tokens
    options = f'"stream":true,"max_tokens":{case.output_tokens},"ignore_eos":true'.encode()
    if model is not None:
        options += b',"model":' + msgspec.json.encode(model)
    if case.kind == "tokens":
        return _token_bodies(dice, tokenizer.vocab_size, prefix_tokens, suffix_tokens, options)
    return _chat_bodies(dice, tokenizer, prefix_tokens, suffix_tokens, options)


def _chat_bodies(
    dice: random.Random, tokenizer: Tokenizer, prefix_tokens: int, suffix_tokens: int, options: bytes
) -> Bodies:
    """The prefix is the system's message, the suffix is the user's."""
    prefixes = [msgspec.json.encode(_text(dice, tokenizer, prefix_tokens)) for _ in range(NUM_PREFIXES)]
    suffixes = [_text(dice, tokenizer, suffix_tokens).encode() for _ in range(SUFFIX_POOL)]
    start = b'{"messages":[{"role":"system","content":'
    middle = b'},{"role":"user","content":"'
    return Bodies(
        "/v1/chat/completions",
        [start + prefix + middle for prefix in prefixes],
        suffixes,
        lambda count: b"%d " % (seed_offset + count),
        b'"}],' + options + b"}",
    )


seed_offset = 1_000_000  # all numbers have the same count of digits


def _token_bodies(
    dice: random.Random, vocab_size: int, prefix_tokens: int, suffix_tokens: int, options: bytes
) -> Bodies:
    def ids(count: int) -> bytes:
        return ",".join(str(dice.randrange(100, vocab_size)) for _ in range(count)).encode()

    def number(count: int) -> bytes:
        return b"%d,%d," % (100 + count % 10_000, 100 + count // 10_000)

    return Bodies(
        "/v1/completions",
        [b'{"prompt":[' + ids(prefix_tokens) + b"," for _ in range(NUM_PREFIXES)],
        [ids(suffix_tokens - 2) for _ in range(SUFFIX_POOL)],
        number,
        b"]," + options + b"}",
    )


def _text(dice: random.Random, tokenizer: Tokenizer, num_tokens: int) -> str:
    """Words that make about this many tokens."""
    words = [dice.choice(WORDS) for _ in range(num_tokens)]
    per_word = len(tokenizer.encode(" ".join(words))) / num_tokens
    return " ".join(words[: round(num_tokens / per_word)])
