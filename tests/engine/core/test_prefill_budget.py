"""How prompts share a step."""

import pytest
from hypothesis import given, strategies as st

from engine.core.prefill_budget import follows, share_out, slips_in


def test_nobody_gets_anything_of_nothing() -> None:
    assert share_out(100, []) == []


@pytest.mark.parametrize(
    ("budget", "left", "shares"),
    [
        (100, [1000], [100]),
        (100, [10], [10]),
        (100, [1000, 10], [90, 10]),
        (100, [1000, 70, 10], [25, 65, 10]),  # a quarter by right, then the shortest first
        (100, [1000, 500, 500], [25, 75, 0]),  # of equals the earlier one
        (10, [1000, 500], [3, 7]),  # a quarter is rounded up
        (100, [20, 500], [20, 80]),
    ],
)
def test_the_first_prompt_has_a_quarter_and_the_shortest_have_the_rest(
    budget: int, left: list[int], shares: list[int]
) -> None:
    assert share_out(budget, left) == shares


@given(st.integers(1, 200), st.lists(st.integers(1, 300), max_size=8))
def test_a_step_is_filled_and_no_prompt_gets_more_than_it_has_left(budget: int, left: list[int]) -> None:
    shares = share_out(budget, left)
    assert sum(shares) == min(budget, sum(left))
    assert all(0 <= share <= rest for share, rest in zip(shares, left, strict=True))


@pytest.mark.parametrize(("left", "first", "slips"), [(50, 100, True), (51, 100, False), (1, 2, True), (2, 2, False)])
def test_a_prompt_of_at_most_half_the_length_begins_before_its_turn(left: int, first: int, slips: bool) -> None:
    assert slips_in(left, first) is slips


@pytest.mark.parametrize(
    ("left", "led", "leader_left", "step_tokens", "waits"),
    [
        (2064, 2000, 2064, 8192, True),
        (2064, 128, 2064, 8192, False),  # a step takes as long
        (2064, 129, 2064, 8192, True),
        (60, 20, 60, 64, True),  # steps are small
        (60, 16, 60, 64, False),
        (2064, 2000, 4127, 8192, True),
        (2064, 2000, 4128, 8192, False),  # it would have a larger share of the steps itself
    ],
)
def test_a_prompt_waits_for_a_leader_of_similar_length_that_computes_more_than_a_steps_worth(
    left: int, led: int, leader_left: int, step_tokens: int, waits: bool
) -> None:
    assert follows(left, led, leader_left, step_tokens) is waits
