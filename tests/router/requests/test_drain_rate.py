"""When a refused caller should come back: by how fast requests leave."""

import pytest

from router.requests.drain_rate import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, DrainRate
from tests.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def rate(clock: Clock) -> DrainRate:
    rate = DrainRate(clock)
    rate.busy()
    return rate


def pass_time(clock: Clock, rate: DrainRate, seconds: int, per_s: int) -> None:
    for _ in range(seconds * per_s):
        clock.now_s += 1 / per_s
        rate.departed()


def test_the_first_one_that_is_refused_is_told_when_the_next_request_leaves(clock: Clock, rate: DrainRate) -> None:
    for _ in range(10):
        clock.now_s += 4.0
        rate.departed()
    assert rate.retry_after_s() == pytest.approx(4.0)


def test_callers_that_are_refused_together_are_not_told_to_come_back_together(clock: Clock, rate: DrainRate) -> None:
    pass_time(clock, rate, 30, per_s=2)
    assert [rate.retry_after_s() for _ in range(6)] == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0, 3.5])
    pass_time(clock, rate, 1, per_s=2)
    assert rate.retry_after_s() == pytest.approx(3.0), "two have left"


def test_each_caller_that_comes_back_when_told_finds_room(clock: Clock, rate: DrainRate) -> None:
    """100 are refused at once; requests leave one by one, at the pace they had."""
    pass_time(clock, rate, 20, per_s=5)
    told = [rate.retry_after_s() for _ in range(100)]
    for number, after_s in enumerate(told):
        assert number + 1 <= after_s * 5 + 1e-6, "as many have left by then"


def test_a_queue_from_which_nothing_leaves_is_not_called_fast(clock: Clock, rate: DrainRate) -> None:
    pass_time(clock, rate, 10, per_s=10)
    clock.now_s += 100.0
    assert rate.retry_after_s() > 1.5
    rate.busy()
    clock.now_s += 8.0
    assert rate.retry_after_s() == pytest.approx(8.0), "nothing has left in 8 s"


def test_an_idle_hour_says_nothing_about_the_pace(clock: Clock, rate: DrainRate) -> None:
    pass_time(clock, rate, 10, per_s=1)
    clock.now_s += 3600.0
    rate.busy()
    pass_time(clock, rate, 10, per_s=1)
    assert rate.retry_after_s() == pytest.approx(1.0)


def test_the_answer_is_within_bounds(clock: Clock, rate: DrainRate) -> None:
    assert rate.retry_after_s() == MIN_RETRY_AFTER_S
    clock.now_s += 1e6
    assert rate.retry_after_s() == MAX_RETRY_AFTER_S


def test_the_pace_is_that_of_the_last_64_departures(clock: Clock, rate: DrainRate) -> None:
    clock.now_s += 129.0
    rate.departed()
    pass_time(clock, rate, 63, per_s=1)
    assert rate.retry_after_s() == pytest.approx(3.0), "64 in 192 s"
    pass_time(clock, rate, 1, per_s=1)
    assert rate.retry_after_s() == pytest.approx(1.0), "64 in 64 s"


def test_a_new_router_knows_no_pace_but_the_time_since_its_start(clock: Clock) -> None:
    rate = DrainRate(clock)
    clock.now_s += 4.0
    assert [rate.retry_after_s() for _ in range(2)] == pytest.approx([4.0, 8.0])
