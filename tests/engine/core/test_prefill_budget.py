"""How prompts share a step."""

from collections.abc import Sequence
from itertools import accumulate, permutations
from math import inf

import pytest
from hypothesis import given, strategies as st

from engine.core.prefill_budget import (
    CAUTION,
    ComingBlocks,
    Due,
    Turns,
    follows,
    share_by_turns,
    share_out,
    slips_in,
    turns,
)

STEP_S = 1.0  # prompts take whole steps here
IN_TIME = Due(1.0, inf)
dues = st.lists(st.builds(Due, st.integers(1, 5), st.one_of(st.integers(0, 20), st.just(inf))), max_size=6)


def can_be_in_time(prompts: Sequence[Due], begins_s: float = 0.0) -> bool:
    """By trying all orders."""
    return any(
        all(
            begins_s + end_s <= due_s
            for end_s, (_, due_s) in zip(accumulate(p.left_s for p in order), order, strict=True)
        )
        for order in permutations(prompts)
    )


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


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), max_size=8), st.integers(0, 7))
def test_a_block_that_prompts_have_in_common_is_computed_by_the_first_of_them_alone(
    prompts: list[list[int]], num_cached: int
) -> None:
    beginnings = [[hash(tuple(prompt[: i + 1])) for i in range(len(prompt))] for prompt in prompts]
    cached = set(beginnings[0][:num_cached]) if beginnings else set()
    coming, computed = ComingBlocks(), set(cached)
    for hashes in beginnings:
        at_hand = sum(one in cached for one in hashes)
        start = coming.start(hashes, at_hand, len(hashes))
        assert start == sum(one in computed for one in hashes)
        coming.add(hashes, start, IN_TIME)
        computed.update(hashes)


def test_blocks_that_nobody_is_about_to_compute_are_not_passed_over_for_later_ones_that_somebody_is() -> None:
    coming = ComingBlocks()
    coming.add(range(20), 5, IN_TIME)  # it saw the five before them cached, which have been evicted since
    assert coming.start(range(20), 0, 20) == 0
    assert coming.start(range(20), 5, 19) == 19


@given(dues)
def test_nobody_is_late_where_any_order_has_all_in_time_and_who_is_not_late_can_be_in_time(prompts: list[Due]) -> None:
    late = turns(prompts, STEP_S).late
    dated = [i for i, prompt in enumerate(prompts) if prompt.due_s < inf]
    assert (not late) == can_be_in_time([prompts[i] for i in dated])
    in_time = [i for i in dated if i not in late]
    assert can_be_in_time([prompts[i] for i in in_time])
    for i in late:
        assert not can_be_in_time([prompts[j] for j in [*in_time, i] if prompts[j].due_s <= prompts[i].due_s])


@given(dues)
def test_who_goes_first_is_in_danger_and_nobody_else_is(prompts: list[Due]) -> None:
    """A step of others, and somebody of them might be late; whoever comes after them can wait for it."""
    first, late = turns(prompts, STEP_S)
    in_time = [i for i, prompt in enumerate(prompts) if prompt.due_s < inf and i not in late]
    slower = [Due(CAUTION * prompt.left_s, prompt.due_s) for prompt in prompts]
    assert [prompts[i].due_s for i in first] == sorted(prompts[i].due_s for i in in_time)[: len(first)]
    if first:
        assert not can_be_in_time([slower[i] for i in first], STEP_S)
    others = [slower[i] for i in in_time if i not in first]
    assert can_be_in_time(others, STEP_S + sum(slower[i].left_s for i in first))


def test_a_prompt_is_complete_when_the_step_ends_in_which_those_behind_it_are_computed_too() -> None:
    assert turns([Due(0.25, 0.5)], STEP_S).late == []
    assert turns([Due(0.25, 0.5), Due(0.75, 9)], STEP_S).late == [0]


@given(st.integers(1, 200), st.lists(st.integers(1, 300), max_size=8))
def test_where_nothing_is_due_the_shares_are_the_usual_ones(budget: int, left: list[int]) -> None:
    assert share_by_turns(budget, left, turns([Due(n, inf) for n in left], STEP_S)) == share_out(budget, left)


@given(
    st.integers(1, 200), st.lists(st.tuples(st.integers(1, 300), st.sampled_from(["first", "late", ""])), max_size=8)
)
def test_danger_goes_first_and_late_ones_last_and_the_eldest_of_the_others_never_starves(
    budget: int, prompts: list[tuple[int, str]]
) -> None:
    left = [n for n, _ in prompts]
    first, late = ([i for i, (_, where) in enumerate(prompts) if where == name] for name in ("first", "late"))
    shares = share_by_turns(budget, left, Turns(first, late))
    assert sum(shares) == min(budget, sum(left))
    assert all(0 <= share <= rest for share, rest in zip(shares, left, strict=True))
    others = [i for i in range(len(left)) if i not in first]
    right = min(left[others[0]], -(-budget // 32)) if others and (first or late) else 0
    if right:
        assert shares[others[0]] >= right
    assert sum(shares[i] for i in first) == min(budget - right, sum(left[i] for i in first))
    if any(shares[i] for i in late if i != others[0]):
        assert all(shares[i] == left[i] for i in range(len(left)) if i not in late)
