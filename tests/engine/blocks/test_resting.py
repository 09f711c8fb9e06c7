"""The order of resting blocks beside a sort of them all."""

import hypothesis.strategies as st
from hypothesis import given

from engine.blocks.resting import AGING, KEPT, Resting

arrivals = st.lists(st.tuples(st.integers(0, KEPT), st.integers(0, 6)), max_size=12)


def rested(arrivals: list[tuple[int, int]]) -> tuple[Resting, int, dict[int, tuple[float, int]]]:
    """Blocks that came to rest at times that may be alike; the time now, and (age, kind) by block."""
    resting, now = Resting(), 7
    for block, (kind, at) in enumerate(arrivals):
        resting.add(kind, block, at)
    return resting, now, {block: ((now - at) * AGING[kind], kind) for block, (kind, at) in enumerate(arrivals)}


@given(arrivals)
def test_the_youngest_come_first_and_of_equals_the_higher_kind(arrivals: list[tuple[int, int]]) -> None:
    resting, now, expected = rested(arrivals)
    told = list(resting.youngest(now))
    assert sorted(block for _, block in told) == sorted(expected)
    order = [(age, -expected[block][1]) for age, block in told]
    assert order == sorted((age, -kind) for age, kind in expected.values())
    at = [(kind, time) for kind, time in (arrivals[block] for _, block in told) if kind == KEPT]
    assert at == sorted(at, reverse=True), "what does not age comes in the order in which it came to rest"


@given(arrivals)
def test_the_oldest_go_first_and_of_equals_the_lower_kind(arrivals: list[tuple[int, int]]) -> None:
    resting, now, expected = rested(arrivals)
    while expected:
        age, kind = resting.oldest(now)
        assert (-age, kind) == min((-age, kind) for age, kind in expected.values())
        block, at = resting.pop(kind)
        assert ((now - at) * AGING[kind], kind) == expected.pop(block)
    assert resting.oldest(now) == (-1.0, 0)
    assert len(resting) == 0
