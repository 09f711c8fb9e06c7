"""How likely each candidate was to be chosen, as `baton events explain` tells it."""

import random

import numpy as np
import pytest
from msgspec.structs import astuple

from router.placement import cost
from router.placement.candidates import NO_CANDIDATES, NO_SHIPPER, Candidates, Cost, Request, Weighed, chances
from router.placement.weights import Weights
from router.workers.account import NUM_COLUMNS
from runtime.config.step_times import StepTimes

CONFIG = Weights()


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
    ("totals", "expected"),
    [
        ((1.0, 2.0), [1.0, 0.0]),
        ((2.0, 1.0, 1.0), [0.0, 0.5, 0.5]),
        ((None, 3.0), [0.0, 1.0]),
        ((None, None), [0.0, 0.0]),
        ((), []),
    ],
)
def test_the_cheapest_share_the_chances_and_a_barred_candidate_has_none(
    totals: tuple[float | None, ...], expected: list[float]
) -> None:
    assert chances(costs(*totals)) == expected


def weighed(role: str, rows: list[tuple[int, ...]], request: Request, config: Weights = CONFIG) -> Weighed:
    """Rows: cached blocks, then the load. A prefill worker, or a decode worker beside prefill workers."""
    workers = Candidates(
        tuple((f"w{i}", 1) for i in range(len(rows))),
        np.array([row[0] for row in rows], dtype=np.int32),
        np.array([(*row[1:], 0, 9999, 0, 0, 0) for row in rows], dtype=np.int64).reshape(len(rows), NUM_COLUMNS),
        np.array([astuple(StepTimes())] * len(rows)),
    )
    shipper = NO_SHIPPER if role == "prefill" else (10.0, 8.0)
    return Weighed(role, request, workers, config, random.Random(1), alone=role == "prefill", shipper=shipper)


def test_a_candidates_cost_comes_with_the_facts_behind_it() -> None:
    rows = [(5, 1, 300, 40, 9), (70, 2, 0, 50, 0)]
    request = Request(1000, 16, frozenset([("w0", 1)]))
    barred, free = weighed("decode", rows, request).costs()
    assert (barred.worker, free.worker) == (("w0", 1), ("w1", 1))
    assert (barred.role, barred.prompt_blocks) == ("decode", 63)
    assert (barred.cached_blocks, barred.queued_tokens, barred.active_blocks) == (5, 300, 40)
    assert (free.cached_blocks, free.queued_tokens, free.active_blocks) == (62, 0, 50)
    assert (barred.barred, free.barred) == (cost.EXCLUDED, cost.FREE)
    assert (barred.reason, barred.runs_prompt) == (cost.SHIPPED, False)
    assert (free.reason, free.runs_prompt) == (cost.SHORT, True)
    assert (len(barred.terms), barred.total) == (cost.NUM_TERMS, pytest.approx(sum(barred.terms)))


def test_a_prefill_worker_runs_the_prompt() -> None:
    (only,) = weighed("prefill", [(5, 1, 300, 40, 9)], Request(1000, 16)).costs()
    assert (only.role, only.active_blocks, only.runs_prompt, only.reason) == ("prefill", 40, True, cost.ALONE)


def test_each_candidate_tells_which_of_its_own_blocks_lie_in_host_memory_and_on_disk() -> None:
    names = tuple((f"w{i}", 1) for i in range(3))
    lower = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int32)
    times = np.array([astuple(StepTimes())] * 3)
    workers = Candidates(names, np.full(3, 9, np.int32), np.full((3, NUM_COLUMNS), 9999, np.int64), times, lower)
    told = Weighed("prefill", Request(1000, 16), workers, CONFIG, random.Random(1), alone=True).costs()
    assert [one.lower_blocks for one in told] == [(1, 4), (2, 5), (3, 6)]


def test_the_chosen_prefill_worker_tells_what_it_costs_that_it_takes_the_prompt() -> None:
    taken = weighed("prefill", [(0, 0, 30_000, 0, 0), (0, 0, 10_000, 0, 0)], Request(1000, 16))
    (_, chosen) = taken.costs()
    assert taken.shipper == (chosen.total, chosen.ttft_ms) == (taken.costs()[1].total, taken.ttft_ms(1))
    assert weighed("prefill", [], Request(1000, 16)).shipper == NO_SHIPPER


def test_of_no_candidates_none_is_chosen_and_none_has_a_cost() -> None:
    nobody = Weighed(
        "decode", Request(10, 16), NO_CANDIDATES, CONFIG, random.Random(1), alone=False, shipper=(1.0, 1.0)
    )
    assert (nobody.chosen, len(nobody), nobody.costs()) == (-1, 0, [])


@pytest.mark.parametrize(("num_tokens", "usable"), [(16, 0), (17, 1), (32, 1), (33, 2), (1000, 2)])
def test_of_the_blocks_that_a_candidate_holds_the_one_with_the_last_token_is_not_spared(
    num_tokens: int, usable: int
) -> None:
    assert weighed("prefill", [(2, 0, 0, 0, 0)], Request(num_tokens, 16)).cached_blocks(0) == (usable, 2)
