"""Every row of the table of terms counts: it has weights, a formula in the loop, and a column in explanations."""

import math
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from baton.cli.events.explain import _candidates, _formula
from baton_proto.generated import inference_pb2 as pb
from router.placement import cost
from router.placement.candidates import NO_SHIPPER, Candidates, Cost, Request, Weighed, chances
from router.placement.cost import SHIPPED, SHORT, TERMS, Term
from router.placement.weights import Weights
from router.views.explain import KNOBS, _candidate, term_rules
from runtime.config.step_times import StepTimes
from runtime.step_rule import prompt_ms

CONFIG = Weights()
REQUEST = Request(1000, 16)
TIMES = msgspec.structs.astuple(StepTimes())
targets_ms = st.sampled_from([10.0, 50.0, 200.0])


def weighed(kind: str, config: Weights = CONFIG) -> Weighed:
    """Two workers that have some of everything; of what they hold, two blocks lie in host memory and one on disk. A
    decode worker receives the prompt's KV."""
    load = np.array([[3, 400, 70, 9000, 0, 60, 500, 0, 3]] * 2, dtype=np.int64)
    lower = np.array([[2, 2], [1, 1]], dtype=np.int32)
    workers = Candidates(
        (("a", 1), ("b", 1)), np.array([5, 7], dtype=np.int32), load, np.array([TIMES] * 2), lower, 2_000
    )
    shipper = (20.0, 15.0) if kind == "decode" else NO_SHIPPER
    return Weighed("decode", REQUEST, workers, config, random.Random(1), alone=kind != "decode", shipper=shipper)


class Dice(random.Random):
    """They fall as they are told."""

    def __init__(self, draw: float) -> None:
        super().__init__()
        self.draw = draw

    def random(self) -> float:
        return self.draw


def thrown(
    draw: float, running: list[int], config: Weights, excluded: frozenset[int] = frozenset(), **limits: int
) -> Weighed:
    """Workers that prefill and decode, named by their place, which differ in running requests alone."""
    n = len(running)
    load = np.array([[count, 0, 0, 0, 0, 999, 0, 0, 0] for count in running], dtype=np.int64)
    names = tuple((str(i), 1) for i in range(n))
    workers = Candidates(names, np.zeros(n, dtype=np.int32), load, np.array([TIMES] * n).reshape(n, 6))
    request = Request(1000, 16, frozenset((str(i), 1) for i in excluded))
    with np.errstate(all="raise"):
        return Weighed("decode", request, workers, config, Dice(draw), alone=True, **limits)


def column(kind: str, term: Term, config: Weights = CONFIG) -> list[float]:
    return [one.terms[TERMS.index(term)] for one in weighed(kind, config).costs()]


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
def test_a_term_counts_somewhere_and_grows_with_its_weight_where_it_has_one(term: Term) -> None:
    config = msgspec.structs.replace(
        CONFIG, ship_ms=0.0, disk_token_ms=0.0001, host_token_ms=0.0001
    )  # below their limit
    kinds = [kind for kind in ("mixed", "decode") if all(column(kind, term, config))]
    assert kinds, "no formula in the loop"
    if term.key:
        more = msgspec.structs.replace(config, **{term.key: 2 * getattr(config, term.key)})
        fixed = 15.0 if term.name == "shipped" else 0.0  # what the prefill worker takes
        for kind in kinds:
            values = [2 * (value - fixed) for value in column(kind, term, config)]
            assert [value - fixed for value in column(kind, term, more)] == pytest.approx(values)


@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_the_terms_add_up_to_the_cost_and_those_of_the_request_itself_to_the_time_of_its_first_token(kind: str) -> None:
    for one in weighed(kind).costs():
        assert one.total == pytest.approx(sum(one.terms))
        weighted = one.terms[cost.DECODE] * (1 - cost.STEPS_TO_FIRST / CONFIG.decode_steps)
        beside_ms = one.ttft_ms - (one.total - one.terms[cost.OTHERS] - weighted)
        assert (beside_ms > 1e-6) == one.runs_prompt, "readers get tokens in the prompts' steps"
        assert beside_ms >= -1e-6


@given(
    st.integers(1, 20_000), st.just(0) | st.integers(1, 40_000), st.integers(1, 60), st.integers(0, 20_000), targets_ms
)
def test_a_first_token_is_expected_when_steps_that_readers_can_bear_have_computed_the_prompts(
    num_tokens: int, queued: int, requests: int, blocks: int, itl_ms: float
) -> None:
    """Compared with taking the steps one by one; only the last of them may be shorter than the others."""
    times, context = StepTimes(), max(0, blocks * 16 - queued)
    load = np.array([[requests, queued, blocks, queued**2 // 2, 0, 99_999, 0, 0, 0]], dtype=np.int64)
    workers = Candidates((("a", 1),), np.zeros(1, dtype=np.int32), load, np.array([TIMES]))
    config = msgspec.structs.replace(CONFIG, itl_ms=itl_ms)
    (one,) = Weighed("decode", Request(num_tokens, 16), workers, config, Dice(0.0), alone=True).costs()
    left_ms = times.prefill_ms(num_tokens, num_tokens**2 / 2)
    left_ms += times.prefill_ms(queued, queued**2 // 2) if queued else 0.0
    readers_ms = times.beside_ms(requests, context)
    floors = times.prefill_floor_ms, times.decode_floor_ms
    prompts_ms = prompt_ms(
        *floors, readers_ms, requests, left_ms / 2, itl_ms, config.ttft_ms
    )  # in the mean half are left
    now_ms = 1.5 * times.decode_ms(requests, context)
    while left_ms > 0.0:
        now_ms += min(left_ms, prompts_ms) + readers_ms
        left_ms -= prompts_ms
    assert now_ms - readers_ms - 1e-6 <= one.ttft_ms <= now_ms + 1e-6


@given(st.lists(st.sampled_from([10, 20, 30]), min_size=1, max_size=6), st.sets(st.integers(0, 5)), st.floats(0, 0.999))
def test_the_cheapest_have_equal_parts_of_the_draws_interval(active: list[int], barred: set[int], draw: float) -> None:
    weighed = thrown(draw, active, CONFIG, frozenset(barred))
    shares = chances(weighed.costs())
    free = [i for i in range(len(active)) if i not in barred]
    cheapest = [i for i in free if active[i] == min(active[j] for j in free)]
    assert shares == [1 / len(cheapest) if i in cheapest else 0.0 for i in range(len(active))]
    assert weighed.chosen == (cheapest[int(draw * len(cheapest))] if cheapest else -1)


def test_nobody_is_chosen_of_nobody_and_of_those_that_are_all_barred() -> None:
    assert thrown(0.5, [], CONFIG).chosen == -1
    barred = thrown(0.5, [1, 2], CONFIG, frozenset([0, 1]))
    assert (barred.chosen, [one.barred for one in barred.costs()]) == (-1, [cost.EXCLUDED] * 2)
    assert [one.terms[cost.OTHERS] for one in barred.costs()] == [0.0, 0.0]
    full = thrown(0.5, [1, 2], CONFIG, max_requests=0)
    assert (full.chosen, [one.barred for one in full.costs()]) == (-1, [cost.NO_ROOM] * 2)


def restored(
    cached: int, host: int, disk: int, kind: str = "mixed", num_tokens: int = 1600, **changes: float
) -> Weighed:
    """A worker with blocks in host memory and on disk. A decode worker receives the prompt."""
    config = msgspec.structs.replace(CONFIG, local_prefill_tokens=0, **changes)
    lower = np.array([[host], [disk]], dtype=np.int32)
    column, load = np.array([cached], dtype=np.int32), np.array([[0, 0, 0, 0, 0, 9999, 0, 0, 0]], dtype=np.int64)
    workers = Candidates((("a", 1),), column, load, np.array([TIMES]), lower)
    shipper = (20.0, 15.0) if kind == "decode" else NO_SHIPPER
    return Weighed(
        "decode", Request(num_tokens, 16), workers, config, Dice(0.0), alone=kind != "decode", shipper=shipper
    )


def lower_terms(only: Weighed) -> tuple[float, float]:
    (one,) = only.costs()
    return one.terms[cost.HOST], one.terms[cost.DISK]


def test_restoring_costs_its_time_but_at_most_that_of_computing_or_receiving() -> None:
    slow = {"host_token_ms": 0.003, "disk_token_ms": 0.06, "ship_token_ms": 0.003}
    computed = 160 * 0.02 + 1.2e-6 * (800**2 - 640**2) / 2
    assert lower_terms(restored(50, 20, 10, **slow)) == pytest.approx((320 * 0.003, computed))
    received = 160 * 0.003
    assert lower_terms(restored(50, 20, 10, "decode", **slow)) == pytest.approx((320 * 0.003, received))
    assert lower_terms(restored(50, 0, 0, **slow)) == (0.0, 0.0)


def test_a_block_from_disk_costs_more_behind_many_tokens_than_at_the_start() -> None:
    """Because it takes longer to compute there."""
    first = lower_terms(restored(10, 0, 10, num_tokens=160_000, disk_token_ms=0.1))
    last = lower_terms(restored(8_000, 0, 10, num_tokens=160_000, disk_token_ms=0.1))
    assert first[1] == pytest.approx(160 * 0.02 + 1.2e-6 * 160**2 / 2)
    assert last[1] == pytest.approx(160 * 0.1)


def test_the_last_block_of_a_whole_prompt_is_computed_and_not_restored() -> None:
    assert lower_terms(restored(100, 0, 3, disk_token_ms=0.005))[1] == pytest.approx(32 * 0.005)
    assert lower_terms(restored(100, 3, 0, host_token_ms=0.005))[0] == pytest.approx(32 * 0.005)
    assert lower_terms(restored(100, 3, 1, host_token_ms=0.005)) == pytest.approx((48 * 0.005, 0.0))


def queues(queued: list[int], times: list[StepTimes], num_tokens: int = 1000) -> Weighed:
    """Workers that prefill and decode and whose last step began just now."""
    n = len(queued)
    load = np.array([[0, tokens, 0, 0, 0, 9999, 0, 0, 0] for tokens in queued], dtype=np.int64)
    names, rows = tuple((str(i), 1) for i in range(n)), np.array([msgspec.structs.astuple(one) for one in times])
    workers = Candidates(names, np.zeros(n, dtype=np.int32), load, rows)
    return Weighed("decode", Request(num_tokens, 16), workers, CONFIG, Dice(0.0), alone=True)


def test_others_wait_for_a_prompt_of_a_fraction_of_a_ms_and_not_for_one_whose_tokens_take_no_time() -> None:
    (short,) = queues([1000], [StepTimes()], num_tokens=10).costs()
    assert short.terms[cost.OTHERS] == pytest.approx(CONFIG.crowd_weight * 20)
    (floor_only,) = queues([1000], [StepTimes(prefill_token_ms=0.0, prefill_pair_ms=0.0)]).costs()
    assert (floor_only.terms[cost.OTHERS], floor_only.ttft_ms) == (0.0, 12.0)


def test_when_nobody_is_in_time_the_soonest_is_chosen_and_not_the_cheapest() -> None:
    """The prompt is computed in 20.6 ms: at once beside 30 requests, or behind a queue of 6 ms."""
    excluded, cheapest, soonest = [[0, 0], [0, 1], [30, 0]]
    load = np.array([[*row, 0, 0, 0, 9999, 0, 0, 0] for row in (excluded, cheapest, soonest)], dtype=np.int64)
    request = Request(1000, 16, frozenset([("0", 1)]))
    times = np.array([msgspec.structs.astuple(StepTimes(decode_floor_ms=2.0, decode_sequence_ms=0.0))] * 3)
    workers = Candidates(tuple((name, 1) for name in "012"), np.zeros(3, dtype=np.int32), load, times)
    for due_ms, chosen in ((0.0, 2), (23.6, 2), (1e3, 1)):
        of = Weighed("decode", request, workers, CONFIG, Dice(0.0), alone=True, due_ms=due_ms)
        assert of.chosen == chosen


def beside(
    shipper: tuple[float, float], due_ms: float = math.inf, num_tokens: int = 10, disk: int = 0, **changes: float
) -> Cost:
    """An idle decode worker beside prefill workers; some of the prompt may lie on its disk. The rest takes 6 ms."""
    lower = np.array([[0], [disk]], dtype=np.int32)
    load = np.array([[0, 0, 0, 0, 0, 9999, 0, 0, 0]], dtype=np.int64)
    workers = Candidates((("a", 1),), np.array([disk], dtype=np.int32), load, np.array([TIMES]), lower)
    config = msgspec.structs.replace(CONFIG, **changes)
    return Weighed(
        "decode", Request(num_tokens, 16), workers, config, Dice(0.0), alone=False, shipper=shipper, due_ms=due_ms
    ).costs()[0]


@pytest.mark.parametrize(
    ("shipper", "due_ms", "reason"),
    [
        ((6.0, 6.0), math.inf, SHORT),  # as cheap
        ((5.9, 5.9), math.inf, SHIPPED),
        ((10.0, 1.0), math.inf, SHORT),  # cheaper, and later
        ((10.0, 1.0), 6.0, SHORT),  # and still in time
        ((10.0, 1.0), 5.9, SHIPPED),
        ((10.0, 6.0), 0.0, SHORT),  # too late both ways, and as soon
        ((1.0, 6.1), 0.0, SHORT),
    ],
)
def test_the_cheaper_way_is_taken_when_both_are_in_time_the_sooner_one_when_not_and_of_two_alike_the_one_without(
    shipper: tuple[float, float], due_ms: float, reason: int
) -> None:
    free = beside(shipper, due_ms, ship_ms=0.0, ship_token_ms=0.0, delay_weight=0.0, crowd_weight=0.0)
    assert free.reason == reason


def test_a_decode_worker_runs_prompts_of_as_many_tokens_as_it_may_and_no_longer_ones() -> None:
    for num_tokens, reason in ((10, SHORT), (11, SHIPPED)):
        assert beside((90.0, 90.0), num_tokens=num_tokens, local_prefill_tokens=10).reason == reason


def test_while_nobody_ships_a_prompt_its_way_is_all_that_shipping_is_said_to_cost() -> None:
    one = beside(NO_SHIPPER, local_prefill_tokens=0, ship_ms=2.0, ship_token_ms=0.5)
    assert (one.barred, one.terms[cost.OTHERS], one.terms[cost.SHIP]) == (cost.NOBODY_SHIPS, 0.0, 2.0 + 10 * 0.5)


def test_a_decode_worker_that_runs_a_prompt_restores_what_it_has_sooner_than_it_computes_it() -> None:
    one = beside((900.0, 900.0), num_tokens=170, disk=10, disk_token_ms=1.0)
    assert one.reason == SHORT
    assert one.terms[cost.DISK] == pytest.approx(160 * 0.02 + 1.2e-6 * 160**2 / 2)


def test_of_a_prompt_that_is_held_whole_the_last_token_is_computed() -> None:
    only = restored(100, 0, 0, "decode")
    assert (only.reason(0), only.cached_blocks(0)) == (SHIPPED, (99, 100))


def test_explanations_show_every_term_and_every_weight() -> None:
    rows = [_candidate(REQUEST, one, 0.5, chosen=False) for one in weighed("mixed").costs()]
    rules = pb.PlacementRules(**term_rules(CONFIG))
    assert [term.name for term in rows[0].terms] == [rule.name for rule in rules.terms] == [row.name for row in TERMS]
    assert set(rules.weights) == set(KNOBS) >= {row.key for row in TERMS if row.key}
    table = _candidates(pb.Decision(candidates=rows), rules)
    assert [str(header.header) for header in table.columns][3:-3] == [row.heading for row in TERMS]
    assert [(row.host_blocks, row.disk_blocks) for row in rows] == [(2, 1), (2, 1)]
    for row in rows:
        del row.terms[cost.DISK]
    assert "+ from disk" not in [header.header for header in _candidates(pb.Decision(candidates=rows), rules).columns]
    formula = " ".join(_formula(rules))
    assert all(row.meaning in formula for row in TERMS)
