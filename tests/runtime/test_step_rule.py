"""The rule by which prompts share steps, compared with trying all possibilities, and its promises at random."""

from itertools import count

from hypothesis import example, given, strategies as st

from runtime.config.step_times import token_pairs
from runtime.step_rule import AGING, LONGEST, TILE, in_tiles, prompt_ms, rank, step_ms, tokens_within

ms = st.floats(0.0, 1e4)


@given(st.floats(0.0, 50.0), st.floats(0.001, 0.5), st.floats(0.0, 1e-3), st.integers(0, 300), st.integers(0, 300))
def test_as_many_tokens_are_taken_as_fit_and_not_one_more(
    budget_ms: float, token_ms: float, pair_ms: float, start: int, left: int
) -> None:
    def taken_ms(tokens: int) -> float:
        return token_ms * tokens + pair_ms * token_pairs(start, tokens)

    found = tokens_within(budget_ms, token_ms, pair_ms, start, left)
    most = max(tokens for tokens in range(left + 1) if taken_ms(tokens) <= budget_ms)
    assert abs(found - most) <= (abs(taken_ms(max(found, most)) - budget_ms) < 1e-6), "but for rounding"


@given(ms, ms, ms, st.floats(1.0, 1e3))
def test_a_step_keeps_its_readers_target_or_gives_prompts_half(
    floor_ms: float, decode_floor_ms: float, readers_ms: float, target_ms: float
) -> None:
    prompts_ms = prompt_ms(floor_ms, decode_floor_ms, readers_ms, target_ms)
    assert prompts_ms >= floor_ms, "what the weights' reading hides costs nobody anything"
    if readers_ms == 0.0:
        assert prompts_ms >= 2 * target_ms
        return
    step_ms = prompts_ms + readers_ms
    assert step_ms <= max(target_ms, 2 * (decode_floor_ms + readers_ms), floor_ms + readers_ms) + 1e-6
    assert step_ms >= target_ms - 1e-6


@given(st.lists(st.tuples(st.floats(0.0, 3000.0), st.floats(1.0, 300.0)), min_size=1, max_size=12))
@example([(0.0, 275.0), *[(1.0, 273.0)] * 9])  # all of them go before it, for 2,457 ms
def test_only_those_go_before_a_prompt_that_come_within_its_own_time_divided_by_aging(
    prompts: list[tuple[float, float]],
) -> None:
    """Steps of 1 ms; times of arrival, work."""
    left = [work for _, work in prompts]
    behind = [0.0] * len(prompts)  # how much later the last one came that went before
    for now_ms in count():
        here = [i for i, (arrived, _) in enumerate(prompts) if arrived <= now_ms and left[i] > 0.0]
        if not any(left):
            break
        if not here:
            continue
        first = min(here, key=lambda i: rank(left[i], now_ms - prompts[i][0]))
        left[first] = max(0.0, left[first] - 1.0)
        for i in here:
            behind[i] = max(behind[i], prompts[first][0] - prompts[i][0])
    for (_, work), later in zip(prompts, behind, strict=True):
        assert later <= work / AGING


@given(st.integers(0, 3 * TILE), st.integers(1, 40 * TILE))
@example(8, 4 * TILE)
@example(2 * TILE - 1, 1)
def test_a_chunk_that_ends_in_mid_prompt_fills_tiles_where_a_step_has_many(before: int, num_tokens: int) -> None:
    taken = in_tiles(before, num_tokens)
    assert 0 < taken <= num_tokens
    if before + num_tokens <= 4 * TILE:
        assert taken == num_tokens
    elif taken != num_tokens:
        assert (before + taken) % TILE == 0
        assert num_tokens - taken < TILE
    else:
        assert (before + taken) % TILE == 0 or taken < TILE, "less than a tile's rest stays as it is"


@given(st.floats(1.0, 1e3), st.floats(1.0, 1e4), ms, ms)
def test_steps_get_longer_with_a_queue_that_endangers_its_own_target(
    target_ms: float, first_ms: float, queue_ms: float, more_ms: float
) -> None:
    found = step_ms(target_ms, first_ms, queue_ms)
    assert target_ms <= found <= LONGEST * target_ms
    assert found <= step_ms(target_ms, first_ms, queue_ms + more_ms)
    assert (found == target_ms) == (queue_ms <= first_ms)
