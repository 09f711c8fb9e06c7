"""What happens in a round, as a pure function of seed and round number: the requests, and the faults meanwhile.

Targets are drawn as numbers and become processes when the fault strikes, because which of them live depends on time.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton_proto.grammar import Grammar
from tests.chaos import grammars
from tests.chaos.service.scenarios import Scenario
from tests.tiny_model import VOCAB_SIZE

SHARED_PROMPTS = 12  # beginnings that prompts share, so that prefixes hit
LONG_HOLD_CHANCE = 0.04  # a fault that may last long does so this often, because such a round takes long
MOST_PROMPT_TOKENS = 1000


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `way`: a row of asking.WAYS. `after`: tokens (or bytes, over HTTP) after which a client leaves.
    `grammar`: what the answer must look like. `model`: empty where there is one."""

    number: int
    at_s: float
    router: int
    way: str
    prompt: tuple[int, ...]
    sampling: Mapping[str, Any] = field(hash=False)
    after: int = 0
    grammar: Grammar | None = None
    model: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """Requests of one key have one answer."""
        return (self.model, self.prompt, self.grammar, *sorted(self.sampling.items()))


@dataclass(frozen=True, slots=True)
class Strike:
    """`fault`: a row of faults.FAULTS. `target`: which of the processes that the fault can hit, modulo their number."""

    fault: str
    at_s: float
    target: int
    hold_s: float


@dataclass(frozen=True, slots=True)
class Round:
    seed: int
    number: int
    asks: tuple[Ask, ...]
    strikes: tuple[Strike, ...]


@dataclass(frozen=True, slots=True)
class Odds:
    """How often a fault is drawn, and for how long it lasts: mostly `hold_s`, at times up to `long_s`."""

    name: str
    weight: float
    hold_s: tuple[float, float] = (0.0, 0.0)
    long_s: float = 0.0


def plan_round(
    seed: int, number: int, scenario: Scenario, odds: Sequence[Odds], ways: Mapping[str, float], peace: bool = False
) -> Round:
    """`ways`: weight of each way to ask. `peace`: without strikes."""
    chance = random.Random(f"{seed}/{number}/{scenario.name}")
    asks = tuple(_ask(chance, index, scenario, ways) for index in range(chance.randint(3, 7)))
    count = 0 if peace else chance.choices((1, 2, 3), (6, 3, 1))[0]
    strikes = tuple(_strike(chance, odds) for _ in range(count))
    return Round(seed, number, asks, strikes)


def _ask(chance: random.Random, number: int, scenario: Scenario, ways: Mapping[str, float]) -> Ask:
    prompt = _tokens(chance.randrange(1 << 40), int(10 ** chance.uniform(0, 3)), scenario)
    if chance.random() < 0.5:
        prompt = (*_tokens(chance.randrange(SHARED_PROMPTS), 200, scenario), *prompt)
    sampling: dict[str, Any] = {"max_tokens": int(10 ** chance.uniform(0.5, 1.95)), "ignore_eos": True}
    # With vLLM a sampled answer that lost its worker goes on with other noise.
    if chance.random() < 0.5 or scenario.engine == "vllm":
        sampling |= {"temperature": 0.0}
    else:
        sampling |= {"temperature": chance.choice((0.7, 1.0)), "seed": chance.randrange(1 << 32)}
        sampling |= chance.choice(({}, {"top_p": 0.9}, {"top_k": 20}))
    way = chance.choices(list(ways), list(ways.values()))[0]
    grammar = None
    if chance.random() < grammars.SHARE:
        grammar = grammars.draw(chance)
        sampling["ignore_eos"] = (
            chance.random() < 0.5
        )  # then the answer ends where the grammar lets nothing else follow
    return Ask(
        number,
        round(chance.uniform(*scenario.asks_s), 3),
        chance.randrange(scenario.routers),
        way,
        prompt[-MOST_PROMPT_TOKENS:],
        sampling,
        chance.randrange(sampling["max_tokens"]),
        grammar,
        chance.choice(scenario.models) if scenario.models else "",
    )


def _strike(chance: random.Random, odds: Sequence[Odds]) -> Strike:
    row = chance.choices(odds, [one.weight for one in odds])[0]
    hold_s = chance.uniform(*row.hold_s)
    if row.long_s and chance.random() < LONG_HOLD_CHANCE:
        hold_s = chance.uniform(row.hold_s[1], row.long_s)
    return Strike(row.name, round(chance.uniform(0, 0.7), 3), chance.randrange(1 << 16), round(hold_s, 3))


def _tokens(seed: int, length: int, scenario: Scenario) -> tuple[int, ...]:
    """No special tokens. Of the mock engine a token is a byte."""
    lowest, highest = (97, 123) if scenario.engine == "mock" else (3, VOCAB_SIZE)
    source = random.Random(seed)
    return tuple(source.randrange(lowest, highest) for _ in range(length))
