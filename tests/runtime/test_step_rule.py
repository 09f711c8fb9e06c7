"""The rule by which prompts share steps, compared with trying all possibilities, and its promises at random."""

from itertools import count

from hypothesis import example, given, strategies as st

from runtime.config.step_times import token_pairs
from runtime.step_rule import AGING, FEW, LATE, LONGEST, MOST, TILE, in_tiles, prompt_ms, rank, tokens_within

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


targets = st.floats(1.0, 1e3), st.floats(1.0, 1e4)


@given(ms, ms, ms, st.integers(0, 100), ms, *targets)
def test_a_step_keeps_its_readers_target_while_they_are_not_few_and_first_tokens_are_in_time(
    floor_ms: float,
    decode_floor_ms: float,
    readers_ms: float,
    readers: int,
    queue_ms: float,
    itl_ms: float,
    ttft_ms: float,
) -> None:
    prompts_ms = prompt_ms(floor_ms, decode_floor_ms, readers_ms, readers, queue_ms, itl_ms, ttft_ms)
    assert prompts_ms >= floor_ms, "what the weights' reading hides costs nobody anything"
    if readers == 0:
        assert prompts_ms >= 2 * itl_ms
        return
    step_ms, half_ms = prompts_ms + readers_ms, max(floor_ms + readers_ms, 2 * (decode_floor_ms + readers_ms))
    assert step_ms >= max(itl_ms, half_ms) - 1e-6, "prompts get half of a step when answers alone miss the target"
    if readers >= FEW and queue_ms <= LATE * ttft_ms:
        assert step_ms <= max(itl_ms, half_ms) + 1e-6
    assert step_ms <= max(LONGEST * itl_ms, floor_ms + readers_ms, MOST * (decode_floor_ms + readers_ms)) + 1e-6


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


@given(ms, st.integers(1, 100), st.integers(0, 100), ms, ms, *targets)
def test_steps_get_longer_with_more_prompts_that_wait_and_with_fewer_readers(
    readers_ms: float, readers: int, more: int, queue_ms: float, more_ms: float, itl_ms: float, ttft_ms: float
) -> None:
    def found_ms(num_readers: int, waiting_ms: float) -> float:
        return prompt_ms(1.0, 1.0, readers_ms, num_readers, waiting_ms, itl_ms, ttft_ms)

    assert found_ms(readers + more, queue_ms) <= found_ms(readers, queue_ms) <= found_ms(readers, queue_ms + more_ms)
