"""Which part of each prompt is cached and where, against a search through all earlier prompts."""

import random
from itertools import pairwise

import numpy as np
import pytest

from simulator.advice.prefixes import find
from simulator.advice.traffic import TraceTraffic
from simulator.requests import NOBODY

BLOCK = 10


def random_ids(dice: random.Random, count: int) -> list[list[int]]:
    """Paths in a tree: each prompt is the beginning of an earlier one and something new."""
    prompts: list[list[int]] = []
    for number in range(count):
        earlier = dice.choice(prompts) if prompts and dice.random() < 0.8 else []
        kept = earlier[: dice.randint(0, len(earlier))]
        prompts.append(kept + [number * 10 + place for place in range(dice.randint(0 if kept else 1, 4))])
    return prompts


def sought(prompts: list[list[int]], number: int, size: int) -> tuple[int, int, int]:
    """(blocks of the prompt that are cached, those that are cached everywhere, the holder) by definition."""

    def held(before: int) -> set[int]:
        """The `size` blocks that were used last; of a prompt the first ones are."""
        latest = {block: (m, -place) for m in range(before) for place, block in enumerate(prompts[m])}
        return set(sorted(latest, key=latest.__getitem__, reverse=True)[:size])

    def is_shared(block: int) -> bool:
        """Whether prompts went on in several ways since the block came into the caches."""
        came = max(m for m in range(number) if block not in held(m))
        return len({after for ids in prompts[came:number] for one, after in pairwise(ids) if one == block}) > 1

    ids, now = prompts[number], held(number)
    cached = next((place for place, block in enumerate(ids) if block not in now), len(ids))
    shared = max((place for place in range(1, cached + 1) if is_shared(ids[place - 1])), default=0)
    holder = NOBODY
    if shared < cached:
        holder = max(m for m in range(number) if ids[cached - 1] in prompts[m])
    return cached, shared, holder


@pytest.mark.parametrize("size", [4, 12, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_prompts_find_what_a_search_through_all_earlier_ones_finds(seed: int, size: int) -> None:
    dice = random.Random(seed)
    prompts = random_ids(dice, 60)
    tokens = np.array([len(ids) * BLOCK - dice.randrange(BLOCK) for ids in prompts])
    found = find(tokens, prompts, BLOCK, size * BLOCK)
    for number, whole in enumerate(tokens.tolist()):
        cached, shared, holder = sought(prompts, number, size)
        left = [whole - min(blocks * BLOCK, whole - 1) for blocks in (cached, shared)]
        assert [found.uncached[number], found.elsewhere[number], found.holder[number]] == [*left, holder]
    assert size < 1000 or ((found.holder != NOBODY).any() and (found.elsewhere < tokens).any())


def test_a_preamble_is_cached_everywhere_and_a_history_where_it_was_computed() -> None:
    """Two agents with one preamble, blocks 1 and 2, in turns."""
    prompt = np.array([30, 30, 40, 40, 30])
    ids = [[1, 2, 3], [1, 2, 4], [1, 2, 3, 5], [1, 2, 4, 6], [1, 2, 7]]
    found = find(prompt, ids, BLOCK, 1000)
    assert found.uncached.tolist() == [30, 10, 10, 10, 10]
    assert found.elsewhere.tolist() == [30, 30, 20, 20, 10]
    assert found.holder.tolist() == [NOBODY, 0, 0, 1, NOBODY]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_holder_is_its_last_copy_before_where_parts_of_a_trace_come_again(seed: int) -> None:
    prompts = random_ids(random.Random(7), 200)
    prompt = np.array([len(ids) * BLOCK for ids in prompts])
    trace = TraceTraffic(np.arange(200.0), prompt, np.arange(200), 0.0, prompts, BLOCK)
    found, drawn = find(prompt, prompts, BLOCK, 10_000), trace.requests(1.0, seed, 10_000)
    order = drawn.output.tolist()  # says which request of the trace it is
    for place, number in enumerate(order):
        copies = [m for m in range(place) if order[m] == found.holder[number]]
        assert drawn.holder[place] == max(copies, default=NOBODY)
        assert drawn.uncached[place] == found.uncached[number]
        assert drawn.elsewhere[place] == (found.elsewhere if copies else found.uncached)[number]
