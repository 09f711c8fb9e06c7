"""The plan against the definition: every granted block leaves once, and never before all its tokens are computed."""

import pytest
from hypothesis import given, strategies as st

from prefill_worker.push_plan import PushPlan


@st.composite
def chunked_prompts(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    """(num_tokens, skip_tokens, block_size, chunk ends); the first chunk starts after the worker's prefix hit."""
    block_size = draw(st.sampled_from([1, 4, 16]))
    num_tokens = draw(st.integers(1, 200))
    most_cached = (num_tokens - 1) // block_size
    skip_tokens = draw(st.integers(0, most_cached)) * block_size
    hit_tokens = draw(st.integers(0, most_cached)) * block_size
    cuts = draw(st.sets(st.integers(hit_tokens + 1, num_tokens)))
    return num_tokens, skip_tokens, block_size, sorted(cuts | {num_tokens})


@given(chunked_prompts())
def test_the_chunks_blocks_are_exactly_the_granted_ones(prompt: tuple[int, int, int, list[int]]) -> None:
    num_tokens, skip_tokens, block_size, ends = prompt
    plan = PushPlan(num_tokens, skip_tokens, block_size)
    pushed = [block for end in ends for block in plan.advance(end)]
    granted = [block for block in range(-(-num_tokens // block_size)) if block * block_size >= skip_tokens]
    assert pushed == granted
    assert [plan.grant_index(block) for block in pushed] == list(range(plan.num_blocks))


@given(chunked_prompts())
def test_a_block_leaves_with_the_chunk_that_completes_it(prompt: tuple[int, int, int, list[int]]) -> None:
    num_tokens, skip_tokens, block_size, ends = prompt
    plan = PushPlan(num_tokens, skip_tokens, block_size)
    for end in ends:
        for block in plan.advance(end):
            last_token = min((block + 1) * block_size, num_tokens) - 1
            assert end == min(e for e in ends if e > last_token)


@given(chunked_prompts(), st.integers(0, 5))
def test_the_end_of_a_prompt_leaves_in_layers_with_a_window_too_at_places_behind_the_others(
    prompt: tuple[int, int, int, list[int]], most: int
) -> None:
    num_tokens, skip_tokens, block_size, ends = prompt
    num_window_blocks = min(most, PushPlan(num_tokens, skip_tokens, block_size).num_blocks)
    plan = PushPlan(num_tokens, skip_tokens, block_size, num_window_blocks)
    pushed = [block for end in ends for block in plan.in_window(plan.advance(end))]
    num_blocks = -(-num_tokens // block_size)
    assert pushed == list(range(num_blocks - num_window_blocks, num_blocks))
    assert [plan.window_index(block) for block in pushed] == [plan.num_blocks + at for at in range(num_window_blocks)]


def test_the_prefix_hit_leaves_with_the_first_chunk() -> None:
    plan = PushPlan(num_tokens=100, skip_tokens=16, block_size=16)
    assert plan.advance(80) == range(1, 5)  # tokens 0..63 were cached here, 64..79 are computed now
    assert plan.advance(100) == range(5, 7)


def test_only_a_partial_last_block_has_a_tail() -> None:
    plan = PushPlan(num_tokens=100, skip_tokens=0, block_size=16)
    assert (plan.tail(50), plan.tail(100)) == (0, 4)
    assert PushPlan(num_tokens=96, skip_tokens=0, block_size=16).tail(96) == 0


@pytest.mark.parametrize("skip_tokens", [8, 17, 32, 48])
def test_a_prefix_that_is_no_whole_blocks_or_leaves_no_token_is_refused(skip_tokens: int) -> None:
    with pytest.raises(AssertionError):
        PushPlan(num_tokens=32, skip_tokens=skip_tokens, block_size=16)


def test_a_chunk_that_ends_within_what_the_decode_worker_has_pushes_nothing() -> None:
    plan = PushPlan(num_tokens=80, skip_tokens=48, block_size=16)
    assert plan.num_blocks == 2
    assert not plan.advance(32)
    assert plan.advance(64) == range(3, 4)
    assert plan.advance(80) == range(4, 5)
