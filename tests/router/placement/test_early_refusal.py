"""Which requests are refused because their first token is expected too late."""

import math
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from router.placement.candidates import Request
from router.placement.early_refusal import TooLate, check_in_time
from router.placement.placement import Weighing
from runtime.config.serving import PlacementConfig
from tests.router.candidates import TIMES, Candidate, weigh

CONFIG = PlacementConfig()
FACTS = Request(1600, 16)


def weighed(
    decode: list[int], prefill: list[int] | None = None, config: PlacementConfig = CONFIG, max_running: int = 9
) -> Weighing:
    """By tokens in the workers' queues."""
    rows = [
        [Candidate((f"{role}{i}", 1), 0, queued, 0) for i, queued in enumerate(queues)]
        for role, queues in (("d", decode), ("p", prefill or []))
    ]
    return weigh(FACTS, rows[0], rows[1], config, random.Random(1), max_running=max_running)


def expected_ms(weighing: Weighing, tokens_before: int = 0) -> float:
    with pytest.raises(TooLate) as late:
        check_in_time(weighing, tokens_before, 0.0)
    return late.value.expected_ms


def test_a_request_is_refused_when_no_worker_can_serve_it_in_time() -> None:
    weighing = weighed([90_000, 50_000])
    placement = weighing.placement()
    assert placement is not None
    assert expected_ms(weighing) == placement.ttft_ms
    check_in_time(weighing, 0, placement.ttft_ms)
    with pytest.raises(TooLate):
        check_in_time(weighing, 0, placement.ttft_ms - 0.001)


def test_no_request_is_refused_while_a_worker_has_nothing_to_do() -> None:
    check_in_time(weighed([90_000, 0]), 0, 0.0)
    check_in_time(weighed([90_000], [0, 50_000], PlacementConfig(local_prefill_tokens=0)), 0, 0.0)
    with pytest.raises(TooLate):
        check_in_time(weighed([90_000, 0]), 10**9, 0.0)


def test_prompts_that_wait_before_it_are_shared_by_all_workers_that_run_prompts() -> None:
    alone, behind = expected_ms(weighed([5000, 5000])), expected_ms(weighed([5000, 5000]), 10_000)
    assert behind - alone == pytest.approx(10_000 * TIMES.prefill[1] / 2)
    split = weighed([0], [5000, 5000], PlacementConfig(local_prefill_tokens=0))
    assert expected_ms(split, 10_000) - expected_ms(split) == pytest.approx(10_000 * TIMES.prefill[1] / 2)


def test_while_every_prefill_worker_has_its_fill_their_queues_count() -> None:
    config = PlacementConfig(local_prefill_tokens=0, prefill_queue_tokens=1000)
    weighing = weighed([0], [40_000, 30_000], config)
    assert weighing.placement() is None
    assert expected_ms(weighing) == pytest.approx(min(cost.ttft_ms for cost in weighing.prefill.costs()))


def test_a_request_that_is_due_at_no_time_or_that_nobody_could_take_waits() -> None:
    check_in_time(weighed([10**9]), 10**9, math.inf)
    check_in_time(weighed([]), 0, 1.0)


@given(
    decode=st.lists(st.integers(0, 100_000), min_size=1, max_size=4),
    prefill=st.lists(st.integers(0, 100_000), max_size=3),
    due_ms=st.floats(1.0, 5000.0),
    fill=st.sampled_from([1000, 10**9]),
)
def test_a_request_that_some_worker_serves_in_time_is_never_refused(
    decode: list[int], prefill: list[int], due_ms: float, fill: int
) -> None:
    weighing = weighed(decode, prefill, PlacementConfig(prefill_queue_tokens=fill))
    free = [cost.ttft_ms for cost in weighing.decode.costs() if not cost.barred]
    try:
        check_in_time(weighing, 0, due_ms)
    except TooLate:
        assert all(ttft_ms > due_ms for ttft_ms in free)
    else:
        assert not free or min(free) <= due_ms or 0 in (prefill or decode)
