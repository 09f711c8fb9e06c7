import itertools

import pytest
from hypothesis import given, settings, strategies as st

from router.requests.rate_limits import Account, Bucket, RateLimits
from runtime.errors import RateLimitError
from runtime.security.callers import Caller
from tests.clock import Clock

gaps = st.lists(st.floats(0, 30, allow_nan=False), min_size=1, max_size=60)


def admitted(account: Account) -> bool:
    try:
        account.admit()
    except RateLimitError:
        return False
    return True


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 50), gaps)
def test_within_no_time_more_requests_are_let_in_than_a_minutes_and_those_of_the_time(
    limit: int, waits: list[float]
) -> None:
    clock = Clock(1000.0)
    account = Account(Caller("a", requests_per_minute=limit), clock)
    let_in = []
    for wait_s in waits:
        clock.now_s += wait_s
        let_in += [clock.now_s for _ in range(limit + 1) if admitted(account)]
    for first, last in itertools.combinations_with_replacement(range(len(let_in)), 2):
        assert last - first + 1 <= limit + (let_in[last] - let_in[first]) * limit / 60 + 1e-6


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 10_000), st.lists(st.tuples(st.floats(0, 30), st.integers(0, 5000)), max_size=40))
def test_tokens_let_in_differ_from_the_rate_by_a_minutes_and_one_request(
    limit: int, steps: list[tuple[float, int]]
) -> None:
    clock = Clock(1000.0)
    account, spent, largest, began_s = Account(Caller("a", tokens_per_minute=limit), clock), 0, 0, clock.now_s
    for wait_s, tokens in steps:
        clock.now_s += wait_s
        if admitted(account):
            account.spend(tokens)
            spent, largest = spent + tokens, max(largest, tokens)
            assert spent <= limit + (clock.now_s - began_s) * limit / 60 + largest


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 10_000), st.lists(st.tuples(st.floats(0, 30), st.integers(0, 5000)), max_size=40))
def test_who_comes_back_when_told_is_let_in_and_not_before(limit: int, steps: list[tuple[float, int]]) -> None:
    now_s = 0.0
    bucket = Bucket(limit, now_s)
    for gap_s, amount in steps:
        now_s += gap_s
        bucket.take(amount, now_s)
    wait_s = bucket.wait_s(now_s)
    if wait_s > 1e-3:
        assert bucket.wait_s(now_s + wait_s * 0.99) > 0
    assert bucket.wait_s(now_s + wait_s * 1.001 + 1e-6) == 0


def test_an_idle_hour_saves_up_no_more_than_a_minute() -> None:
    clock = Clock(1000.0)
    account = Account(Caller("a", requests_per_minute=3), clock)
    clock.now_s += 3600
    assert [admitted(account) for _ in range(4)] == [True, True, True, False]


def test_a_refusal_says_limit_unit_and_time() -> None:
    clock = Clock(1000.0)
    account = Account(Caller("a", requests_per_minute=60, tokens_per_minute=600), clock)
    account.admit()
    account.spend(1200)
    with pytest.raises(
        RateLimitError, match=r"this key's limit of 600 tokens per minute is reached; try again in 60\.1 s"
    ):
        account.admit()
    clock.now_s += 61
    assert admitted(account)


def test_callers_have_accounts_of_their_own_and_a_changed_line_begins_anew() -> None:
    limits = RateLimits(Clock(1000.0))
    one, same, other, changed = (
        Caller(tenant, None, limit) for tenant, limit in (("a", 1), ("a", 1), ("b", 1), ("a", 2))
    )
    assert admitted(limits.account(one))
    assert not admitted(limits.account(same))
    assert admitted(limits.account(other))
    assert admitted(limits.account(changed))
    assert all(admitted(limits.account(Caller("c"))) for _ in range(1000))
