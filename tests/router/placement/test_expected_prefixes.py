"""Expectations against a plain list of them, and the ways in which they end."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from router.placement.expected_prefixes import EVENT_GRACE_S, MAX_RUNS, MAX_WAITING, Expectation, ExpectedPrefixes
from tests.clock import Clock

A, B = ("a", 1), ("b", 1)


def blocks(path: list[int]) -> NDArray[np.uint64]:
    return np.array(path, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def expected(clock: Clock) -> ExpectedPrefixes:
    return ExpectedPrefixes(30.0, clock)


def test_the_oldest_makes_room_when_too_many_prompts_wait(expected: ExpectedPrefixes) -> None:
    for number in range(MAX_WAITING + 3):
        expected.expect(A, blocks([number + 1, 5]), 0)
    assert expected.count == MAX_WAITING
    assert expected.outlook({}, blocks([3, 5])) == {}
    assert expected.outlook({}, blocks([4, 5])) == {A: 2}


def test_a_query_follows_a_bounded_number_of_branches(expected: ExpectedPrefixes) -> None:
    trunk = list(range(1, 2 * MAX_RUNS))
    for length in range(1, len(trunk)):
        expected.expect(A, blocks([*trunk[:length], 999]), 0)
    assert expected.outlook({}, blocks(trunk)) == {A: MAX_RUNS}


paths = st.lists(st.integers(1, 3), min_size=1, max_size=8)
workers = st.sampled_from([A, B, ("c", 1)])


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("expect"), workers, paths, st.integers(0, 8)),
            st.tuples(st.sampled_from(["token", "cancel", "stored"]), st.integers(0, 50)),
            st.tuples(st.just("forget"), workers),
            st.tuples(st.just("wait"), st.sampled_from([0.3, 0.5, 12.0])),
        ),
        max_size=60,
    ),
    st.lists(paths, max_size=6),
)
def test_it_answers_as_a_list_of_prompts_would(steps: list[tuple[object, ...]], queries: list[list[int]]) -> None:
    clock = Clock(0.0)
    expected = ExpectedPrefixes(30.0, clock)
    live: list[tuple[Expectation, tuple[str, int], list[int], int, list[float]]] = []
    for step in steps:
        if step[0] == "expect":
            _, worker, path, known = step
            assert isinstance(worker, tuple)
            assert isinstance(path, list)
            assert isinstance(known, int)
            made = expected.expect(worker, blocks(path), known)
            if made is not None:
                live.append((made, worker, path, known, [clock.now_s + 30.0, 0.0]))
        elif step[0] == "wait":
            clock.now_s += float(str(step[1]))
        elif step[0] == "forget":
            worker = step[1]
            assert isinstance(worker, tuple)
            expected.forget(worker)
            live = [entry for entry in live if entry[1] != worker]
        elif live:
            at = int(str(step[1])) % len(live)
            made, worker, path, _, times = live[at]
            if step[0] == "token":
                made.first_token()
                if not times[1] and clock.now_s < times[0]:
                    times[:] = [clock.now_s + EVENT_GRACE_S, 1.0]
            elif step[0] == "cancel":
                made.cancel()
                if not times[1]:
                    del live[at]
            else:
                expected.stored(worker, blocks(path[-2:]).tobytes())
                last = path[-1]
                live = [entry for entry in live if not (entry[1] == worker and entry[2][-1] == last)]
        live = [entry for entry in live if entry[4][0] > clock.now_s]
        for query in [*queries, *[path for _, _, path, _, _ in live]]:
            reach: dict[tuple[str, int], int] = {}
            for _, worker, path, known, _ in live:
                shared = next((i for i, (a, b) in enumerate(zip(path, query, strict=False)) if a != b), None)
                shared = min(len(path), len(query)) if shared is None else shared
                if shared > known:
                    reach[worker] = max(reach.get(worker, 0), shared)
            assert expected.outlook({}, blocks(query)) == reach
    for made, *_ in live:
        made.first_token()
    clock.now_s += 100.0
    expected.outlook({}, blocks([1]))
    assert expected.count == 0
    assert not expected._root.children, "no node is left behind"


@given(
    st.lists(st.tuples(workers, paths, st.integers(0, 7), st.booleans()), max_size=12),
    st.dictionaries(workers, st.integers(0, 8)),
    paths,
)
def test_of_a_query_each_worker_is_expected_to_hold_what_its_longest_prompt_shares_with_it(
    prompts: list[tuple[tuple[str, int], list[int], int, bool]], held: dict[tuple[str, int], int], query: list[int]
) -> None:
    """Whatever the order of the prompts, and with what the tree knows already."""
    expected = ExpectedPrefixes(30.0, Clock(0.0))
    reach = dict(held)
    for worker, path, known, has_token in prompts:
        made = expected.expect(worker, blocks(path), known)
        assert (made is None) == (known >= len(path))
        if made is None:
            continue
        if has_token:
            made.first_token()
        shared = next((i for i, (a, b) in enumerate(zip(path, query, strict=False)) if a != b), None)
        shared = min(len(path), len(query)) if shared is None else shared
        if shared > known:
            reach[worker] = max(reach.get(worker, 0), shared)
    answer = expected.outlook(held, blocks(query))
    assert answer == reach
    assert all(type(count) is int for count in answer.values())


def test_what_the_tree_says_is_passed_on_as_it_is_when_no_more_is_expected(expected: ExpectedPrefixes) -> None:
    """A Match gives its columns faster than a dict."""
    held = {A: 2}
    assert expected.outlook(held, blocks([1, 2])) is held
    expected.expect(A, blocks([1, 2]), 1)
    assert expected.outlook(held, blocks([1, 2])) is held
    assert expected.outlook(held, blocks([9])) is held


def test_a_prompt_is_expected_for_its_time_from_when_it_is_placed(expected: ExpectedPrefixes, clock: Clock) -> None:
    clock.now_s = 100.0
    made = expected.expect(A, blocks([1, 2, 3]), 1)
    assert made is not None
    assert (made.worker, made.expires_s, made.last_block) == (A, 130.0, blocks([3]).tobytes())
    made.first_token()
    assert made.expires_s == 100.0 + EVENT_GRACE_S
    assert ExpectedPrefixes(0.0).expect(A, blocks([1]), 0) is None, "switched off"
