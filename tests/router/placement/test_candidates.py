"""How likely each candidate was to be chosen, as `baton events explain` tells it."""

import math
import random

import numpy as np
import pytest
from msgspec.structs import replace

from router.placement import cost
from router.placement.candidates import NO_CANDIDATES, Candidates, Cost, Request, Weighed, chances
from runtime.config.serving import PlacementConfig

CONFIG = PlacementConfig()


def costs(*totals: float | None) -> list[Cost]:
    """None: barred."""
    return [
        Cost(
            **dict.fromkeys(Cost.__annotations__, 0)
            | {"total": total or 0.0, "barred": cost.NO_ROOM if total is None else cost.FREE}
        )
        for total in totals
    ]


@pytest.mark.parametrize(
    ("totals", "temperature", "expected"),
    [
        ((1.0, 2.0), 0.0, [1.0, 0.0]),
        ((2.0, 1.0, 1.0), 0.0, [0.0, 0.5, 0.5]),
        ((None, 3.0), 0.0, [0.0, 1.0]),
        ((None, None), 0.0, [0.0, 0.0]),
        ((None, None), 1.0, [0.0, 0.0]),
        ((1.0, 1.0), 1.0, [0.5, 0.5]),
        ((2.0, 6.0), 0.5, [1 / (1 + math.exp(-2)), math.exp(-2) / (1 + math.exp(-2))]),
        ((0.1, 0.2), 0.25, [1 / (1 + math.exp(-4)), math.exp(-4) / (1 + math.exp(-4))]),
        ((0.0, 4.0, None), 0.5, [1 / (1 + math.exp(-2)), math.exp(-2) / (1 + math.exp(-2)), 0.0]),
    ],
)
def test_chances_follow_cost_and_temperature_and_a_barred_candidate_has_none(
    totals: tuple[float | None, ...], temperature: float, expected: list[float]
) -> None:
    assert chances(costs(*totals), temperature) == pytest.approx(expected)


def weighed(
    role: str,
    rows: list[tuple[int, ...]],
    request: Request,
    config: PlacementConfig = CONFIG,
    *,
    can_ship: bool = False,
) -> Weighed:
    """Rows: cached blocks, then the load. A prefill worker, or a decode worker beside prefill workers."""
    workers = Candidates(
        tuple((f"w{i}", 1) for i in range(len(rows))),
        np.array([row[0] for row in rows], dtype=np.int32),
        np.array([row[1:] for row in rows], dtype=np.int64).reshape(len(rows), 4),
        np.zeros(len(rows)),
    )
    rules = cost.Rules(config)
    weights = rules.prefill if role == "prefill" else rules.decode
    return Weighed(
        *(role, request, workers, rules, weights, random.Random(1)), alone=role == "prefill", can_ship=can_ship
    )


def test_a_candidates_cost_comes_with_the_facts_behind_it() -> None:
    config = replace(CONFIG, overlap_weight=1.5)
    rows = [(5, 1, 300, 40, 9), (70, 2, 0, 50, 0)]
    request = Request(1000, 16, frozenset([("w0", 1)]))
    barred, free = weighed("decode", rows, request, config, can_ship=True).costs()
    assert (barred.worker, free.worker) == (("w0", 1), ("w1", 1))
    assert (barred.role, barred.prompt_blocks, barred.overlap_weight) == ("decode", 63, 1.5)
    assert (barred.cached_blocks, barred.queued_tokens, barred.active_blocks) == (5, 300, 40)
    assert (free.cached_blocks, free.queued_tokens, free.active_blocks) == (62, 0, 50)
    assert (barred.barred, free.barred) == (cost.EXCLUDED, cost.FREE)
    assert (barred.reason, barred.runs_prompt) == (cost.SHIPPED, False)
    assert (free.reason, free.runs_prompt) == (cost.SHORT, True)
    assert (len(barred.terms), barred.total) == (cost.NUM_TERMS, pytest.approx(sum(barred.terms)))


def test_a_prefill_workers_active_blocks_are_told_as_0_and_it_runs_the_prompt() -> None:
    (only,) = weighed("prefill", [(5, 1, 300, 40, 9)], Request(1000, 16)).costs()
    assert (only.role, only.active_blocks, only.runs_prompt, only.reason) == ("prefill", 0, True, cost.ALONE)


def test_the_attention_of_a_prompt_costs_its_pairs_of_tokens_over_the_tokens_that_double_a_block() -> None:
    """A prompt of twice `attention_tokens` costs twice its blocks, whatever the size of a block."""
    for block_size in (16, 64):
        config = replace(CONFIG, attention_tokens=1024, prefill_weight=1.0)
        (only,) = weighed("prefill", [(0, 0, 0, 0, 0)], Request(2048, block_size), config).costs()
        assert only.total == pytest.approx(2 * 2048 / block_size)
        (flat,) = weighed(
            "prefill", [(0, 0, 0, 0, 0)], Request(2048, block_size), replace(config, attention_tokens=0)
        ).costs()
        assert flat.total == pytest.approx(2048 / block_size)


@pytest.mark.parametrize(("when_full", "tokens", "helps"), [(True, 1, True), (True, 0, False), (False, 32, False)])
def test_a_decode_worker_helps_full_prefill_workers_only_where_it_may_run_prompts_at_all(
    when_full: bool, tokens: int, helps: bool
) -> None:
    config = replace(CONFIG, local_prefill_when_full=when_full, local_prefill_tokens=tokens)
    one = weighed("decode", [(0, 0, 0, 0, 0)], Request(5000, 16), config)
    assert (one.chosen, one.reason(0)) == ((0, cost.FULL) if helps else (-1, cost.SHIPPED))


def test_of_no_candidates_none_is_chosen_and_none_has_a_cost() -> None:
    rules = cost.Rules(CONFIG)
    nobody = Weighed(
        *("decode", Request(10, 16), NO_CANDIDATES, rules, rules.decode, random.Random(1)), alone=False, can_ship=True
    )
    assert (nobody.chosen, len(nobody), nobody.costs()) == (-1, 0, [])


@pytest.mark.parametrize(("num_tokens", "usable"), [(16, 0), (17, 1), (32, 1), (33, 2), (1000, 2)])
def test_of_the_blocks_that_a_candidate_holds_the_one_with_the_last_token_is_not_spared(
    num_tokens: int, usable: int
) -> None:
    assert weighed("prefill", [(2, 0, 0, 0, 0)], Request(num_tokens, 16)).cached_blocks(0) == (usable, 2)
