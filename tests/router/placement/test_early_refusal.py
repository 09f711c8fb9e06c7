"""Which requests are refused because their first token is expected too late."""

import math
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from router.placement.candidates import NO_WORK, Request, Work
from router.placement.early_refusal import TooLate, check_in_time
from router.placement.placement import Weighing
from router.placement.weights import Weights
from tests.router.candidates import TIMES, Candidate, weigh

CONFIG = Weights()
FACTS = Request(1600, 16)


def weighed(
    decode: list[int],
    prefill: list[int] | None = None,
    config: Weights = CONFIG,
    due_ms: float = 0.0,
) -> Weighing:
    """By tokens in the workers' queues."""
    rows = [
        [Candidate((f"{role}{i}", 1), 0, queued, 0) for i, queued in enumerate(queues)]
        for role, queues in (("d", decode), ("p", prefill or []))
    ]
    return weigh(FACTS, rows[0], rows[1], config, random.Random(1), max_running=9, due_ms=due_ms)


def expected_ms(weighing: Weighing, before: Work = NO_WORK) -> float:
    with pytest.raises(TooLate) as late:
        check_in_time(weighing, before, 0.0)
    return late.value.expected_ms


def test_a_request_is_refused_when_no_worker_can_serve_it_in_time() -> None:
    weighing = weighed([90_000, 50_000])
    placement = weighing.placement()
    assert placement is not None
    assert expected_ms(weighing) == placement.ttft_ms
    check_in_time(weighing, NO_WORK, placement.ttft_ms)
    with pytest.raises(TooLate):
        check_in_time(weighing, NO_WORK, placement.ttft_ms - 0.001)


def test_no_request_is_refused_while_a_worker_has_nothing_to_do() -> None:
    check_in_time(weighed([90_000, 0]), NO_WORK, 0.0)
    check_in_time(weighed([90_000], [0, 50_000], Weights(local_prefill_tokens=0)), NO_WORK, 0.0)
    with pytest.raises(TooLate):
        check_in_time(weighed([90_000, 0]), Work(10**9, 0), 0.0)


def test_prompts_that_wait_before_it_are_shared_by_all_workers_that_run_prompts() -> None:
    """With the attention of each."""
    work = Work(100_000, 5e9)
    taken_ms = 100_000 * TIMES.prefill[1] + 5e9 * TIMES.prefill[2]
    assert taken_ms > 3 * 100_000 * TIMES.prefill[1]
    mixed, split = weighed([5000, 5000]), weighed([0], [5000, 5000], Weights(local_prefill_tokens=0))
    for weighing in (mixed, split):
        assert expected_ms(weighing, work) - expected_ms(weighing) == pytest.approx(taken_ms / 2)


def test_while_every_prefill_worker_has_its_fill_their_queues_count() -> None:
    config = Weights(local_prefill_tokens=0, prefill_queue_tokens=1000)
    weighing = weighed([0], [40_000, 30_000], config)
    assert weighing.placement() is None
    assert expected_ms(weighing) == pytest.approx(min(cost.ttft_ms for cost in weighing.prefill.costs()))


def test_a_request_that_is_due_at_no_time_or_that_nobody_could_take_waits() -> None:
    check_in_time(weighed([10**9]), Work(10**9, 0), math.inf)
    check_in_time(weighed([]), NO_WORK, 1.0)


def shippers(num_tokens: int, due_ms: float) -> Weighing:
    """Prompts that are shipped by workers with (cached blocks, queued tokens)."""
    rows = [((365, 15910), "dear"), ((104, 3120), "soon"), ((167, 10831), "late")]
    prefill = [Candidate((name, 1), cached, queued, 0) for (cached, queued), name in rows]
    config = Weights(local_prefill_tokens=0)
    facts = Request(num_tokens, 16)
    return weigh(facts, [Candidate(("d", 1), 0, 0, 0)], prefill, config, random.Random(1), due_ms=due_ms)


def test_a_prompt_is_shipped_by_a_worker_that_is_in_time_however_cheap_one_is_that_is_not() -> None:
    chosen = {}
    for due_ms in (278.0, math.inf):
        weighing = shippers(6400, due_ms)
        check_in_time(weighing, NO_WORK, due_ms)
        placement = weighing.placement()
        assert placement is not None
        assert placement.ttft_ms <= due_ms
        chosen[due_ms] = placement.prefill
    assert chosen == {278.0: ("soon", 1), math.inf: ("dear", 1)}


def test_a_cheap_prefill_worker_is_passed_where_the_decode_workers_part_of_the_way_makes_it_late() -> None:
    decode = [Candidate(("d", 1), 0, 0, 0, room=(0, 200, 0, 0))]  # each block comes free after 0.2 ms
    prefill = [Candidate(("dear", 1), 365, 15910, 0), Candidate(("soon", 1), 104, 3120, 0)]
    config = Weights(local_prefill_tokens=0)
    ttft_ms = {}
    for due_ms in (1e9, 1.0):
        weighing = weigh(Request(6400, 16), decode, prefill, config, random.Random(1), due_ms=due_ms)
        placement = weighing.placement()
        assert placement is not None
        ttft_ms[placement.prefill] = placement.ttft_ms
    cheap_ms, soonest_ms = ttft_ms["dear", 1], ttft_ms["soon", 1]
    for due_ms in (cheap_ms - 1, cheap_ms - 20, soonest_ms):
        weighing = weigh(Request(6400, 16), decode, prefill, config, random.Random(1), due_ms=due_ms)
        check_in_time(weighing, NO_WORK, due_ms)


def test_a_request_that_is_let_in_goes_to_the_cheapest_worker_that_is_in_time() -> None:
    rows = ((2, 6016), (232, 12907), (94, 5714))
    decode = [Candidate((f"d{i}", 1), cached, queued, 0) for i, (cached, queued) in enumerate(rows)]
    for due_ms in (282.0, 240.0, 1.0, math.inf):
        weighing = weigh(Request(6400, 16), decode, [], CONFIG, random.Random(1), due_ms=due_ms)
        placement = weighing.placement()
        assert placement is not None
        costs = placement.costs
        soonest = min(cost.ttft_ms for cost in costs)
        in_time = [cost.total for cost in costs if cost.ttft_ms <= max(due_ms, soonest)]
        (chosen,) = [cost for cost in costs if cost.worker == placement.decode]
        assert chosen.total == min(in_time)
        assert chosen.ttft_ms <= max(due_ms, soonest)


@given(
    decode=st.lists(st.integers(0, 100_000), min_size=1, max_size=4),
    prefill=st.lists(st.integers(0, 100_000), max_size=3),
    due_ms=st.floats(1.0, 5000.0),
    fill=st.sampled_from([1000, 10**9]),
)
def test_a_request_that_some_worker_serves_in_time_is_never_refused(
    decode: list[int], prefill: list[int], due_ms: float, fill: int
) -> None:
    weighing = weighed(decode, prefill, Weights(prefill_queue_tokens=fill), due_ms)
    free = [cost.ttft_ms for cost in weighing.decode.costs() if not cost.barred]
    try:
        check_in_time(weighing, NO_WORK, due_ms)
    except TooLate:
        assert all(ttft_ms > due_ms for ttft_ms in free)
    else:
        placement = weighing.placement()
        runs_it = placement is not None and placement.prefill is None
        assert not free or min(free) <= due_ms or 0 in (prefill or decode) or (runs_it and 0 in decode)


class Dice(random.Random):
    """Counts its draws: one per role and weighing."""

    draws = 0

    def random(self) -> float:
        self.draws += 1
        return super().random()


def test_a_late_request_is_weighed_again_only_where_a_prefill_worker_takes_it() -> None:
    config = Weights(prefill_queue_tokens=10**6)
    idle, full = Candidate(("d", 1), 0, 0, 0), Candidate(("p", 1), 0, 10**6, 0)
    for prefill, draws in (([], 1), ([full], 2), ([full, Candidate(("q", 1), 0, 0, 0)], 4)):
        dice = Dice(1)
        weigh(FACTS, [idle], prefill, config, dice, due_ms=1.0)
        assert dice.draws == draws
