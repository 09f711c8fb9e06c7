"""Sizes from a demand, against direct simulations of the cluster."""

import heapq
import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import assume, example, given, settings, strategies as st

from benchmarks.planner.day import Setting, follow
from benchmarks.planner.fleet import Delays
from benchmarks.planner.serving import Hardware, Limits
from benchmarks.planner.workload import chat_lengths, requests_of
from planner.policy.sizing import (
    MAX_WORKERS,
    Lengths,
    PromptTime,
    decode_workers,
    length_spread,
    prefill_workers,
    prompt_time,
    workers_for,
)
from runtime.config.planner import TargetsConfig
from runtime.config.step_times import StepTimes, token_pairs

ENGINE = StepTimes().faster(0.25)
TIMES = StepTimes(24.0, 0.08, 4.8e-6, 20.0, 0.08, 1.68e-4)  # of that engine
TARGETS = TargetsConfig(ttft_ms=1500, itl_ms=60, attainment=0.99)
PROMPT, OUTPUT = chat_lengths(np.random.default_rng(9), 100_000)
CONTEXT = float((OUTPUT * (PROMPT + OUTPUT / 2)).sum() / OUTPUT.sum())
LENGTHS = Lengths(PROMPT.mean(), (PROMPT.astype(float) ** 2).mean(), OUTPUT.mean(), 0.0, 0.0, CONTEXT)


def attained(rate: float, prefill: int, decode: int) -> float:
    requests = requests_of(np.full(1, rate), chat_lengths, 3, bin_s=1200)
    setting = Setting(Hardware(ENGINE), Limits(1.5, 0.06), Delays(), 0, 1200, (0, 0))
    return follow(requests, setting, [(prefill, decode)], 1200).attainment


@pytest.mark.parametrize("rate", [5.0, 15.0, 40.0, 100.0])
def test_prefill_workers_are_enough_and_hardly_more_than_enough(rate: float) -> None:
    found = prefill_workers(rate, prompt_time(LENGTHS, TIMES), TARGETS)
    plenty = 60
    assert attained(rate, found, plenty) >= 0.985
    assert found == 1 or attained(rate, found - 2 if rate > 50 else found - 1, plenty) < 0.99


@pytest.mark.parametrize("rate", [5.0, 15.0, 40.0, 100.0])
def test_decode_workers_are_enough_and_hardly_more_than_enough(rate: float) -> None:
    found = decode_workers(rate, LENGTHS, TIMES, TARGETS, 0.0, 0.9 * 524_288, 256)
    plenty = 60
    assert attained(rate, plenty, found) >= 0.985
    assert found == 1 or attained(rate, plenty, found - 2 if rate > 15 else found - 1) < 0.99


def test_no_requests_need_nobody() -> None:
    assert prefill_workers(0, prompt_time(LENGTHS, TIMES), TARGETS) == 0
    assert decode_workers(0, LENGTHS, TIMES, TARGETS, 0.0, 1e9, 1e9) == 0


def test_a_prompts_time_is_that_of_the_tokens_that_no_cache_holds() -> None:
    """Of 1,000 tokens 750 are computed behind 250."""
    prompt = prompt_time(Lengths(1000, 1e6, 200, 0.25, 0.0, 1100), TIMES)
    assert prompt.mean_ms == pytest.approx(TIMES.prefill_ms(750, token_pairs(250, 750)))
    assert prompt.cv2 == 0


@pytest.mark.parametrize(
    ("tokens", "squared", "spread"),
    [(1000, 3e6, 2.0), (1000, 1.5e6, 0.5), (1.0, 3.0, 2.0), (1.5, 4.5, 1.0), (0.0, 0.0, 0.0), (1000, 0.9e6, 0.0)],
)
def test_the_spread_of_lengths_is_their_variance_over_the_square_of_their_mean(
    tokens: float, squared: float, spread: float
) -> None:
    assert length_spread(Lengths(tokens, squared, 200, 0.0, 0.0, 1100)) == pytest.approx(spread)


@given(st.floats(0.1, 100), st.floats(10, 3000), st.floats(0, 4), st.floats(0.5, 0.999))
@example(100.0, 500.0, 0.25, 0.99)
@settings(deadline=None)
def test_prefill_workers_are_the_fewest_whose_queue_leaves_time_for_a_long_prompt(
    rate: float, mean_ms: float, cv2: float, attainment: float
) -> None:
    """A long prompt is two standard deviations above the mean; a tenth of the target is always left for waiting."""
    left_ms = max(150.0, 1500.0 - (mean_ms + 2 * math.sqrt(cv2 * mean_ms**2)))
    found = prefill_workers(rate, PromptTime(mean_ms, cv2), TargetsConfig(1500.0, 60.0, attainment))
    load, late = rate * mean_ms / 1000, 1 - attainment
    assert found == workers_for(load, left_ms / mean_ms, cv2, late)


def meets(workers: int, rate: float, lengths: Lengths, targets: TargetsConfig, prompt_ms: float) -> tuple[float, float]:
    """Step time and running sequences of one worker at the quantile of the target, by the docstring's formulas."""
    context = lengths.context_tokens
    sequence_ms = TIMES.decode_sequence_ms + TIMES.decode_token_ms * context
    tokens_per_ms = rate / 1000 * lengths.output_tokens
    own = rate / 1000 * prompt_ms
    utilisation = (tokens_per_ms * sequence_ms + own) / workers
    mean = tokens_per_ms * TIMES.decode_floor_ms / (1 - utilisation)
    part = TIMES.decode_token_ms * context / sequence_ms
    deviation = math.sqrt(mean * (1 + part**2 * length_spread(lengths)) / (1 - utilisation))
    running = (mean + NormalDist().inv_cdf(targets.attainment) * deviation) / workers
    return (TIMES.decode_floor_ms + sequence_ms * running) / (1 - own / workers), running


@given(
    st.floats(0.01, 40),
    st.floats(1, 1000),
    st.floats(1, 8),
    st.floats(0, 20_000),
    st.floats(22, 200),
    st.floats(0.5, 0.999),
    st.sampled_from([0.0, 30.0, 500.0]),
    st.sampled_from([1e9, 100_000.0, 20_000.0]),
    st.sampled_from([1e9, 200.0, 10.0]),
)
@example(30.0, 800.0, 8.0, 4000.0, 40.0, 0.999, 0.0, 1e9, 1e9)
@example(30.0, 400.0, 8.0, 1000.0, 60.0, 0.999, 0.0, 1e9, 1e9)
@settings(deadline=None)
def test_decode_workers_are_the_fewest_that_are_fast_enough_and_hold_all(
    rate: float,
    output: float,
    ratio: float,
    context: float,
    itl_ms: float,
    attainment: float,
    prompt_ms: float,
    kv_tokens: float,
    max_running: float,
) -> None:
    lengths = Lengths(500, 500**2 * ratio, output, 0.0, 0.0, context)
    targets = TargetsConfig(1500.0, itl_ms, attainment)
    sequence_ms = TIMES.decode_sequence_ms + TIMES.decode_token_ms * context
    least = math.floor(rate * output / 1000 * sequence_ms + rate * prompt_ms / 1000) + 1  # else the queue has no end
    assume(least < 200)

    def enough(workers: int) -> bool:
        step_ms, running = meets(workers, rate, lengths, targets, prompt_ms)
        return step_ms <= itl_ms and running * context <= kv_tokens and running <= max_running

    expected = next((workers for workers in range(least, 4096) if enough(workers)), 4096)
    assert decode_workers(rate, lengths, TIMES, targets, prompt_ms, kv_tokens, max_running) == expected


def test_a_floor_at_the_target_is_hopeless_and_gives_workers_at_half_load() -> None:
    """40 requests/s of 250 tokens, 0.08 ms each, and of 25 ms of prompt are 1.8 workers' time."""
    lengths = Lengths(1000, 1e6, 250, 0.0, 0.0, 0.0)
    assert decode_workers(40, lengths, TIMES, TargetsConfig(1500.0, 20.0), 25.0, 1e9, 1e9) == 4
    assert decode_workers(40, lengths, TIMES, TargetsConfig(1500.0, 19.0), 0.0, 1e9, 1e9) == 2


def test_the_number_of_workers_is_bounded() -> None:
    endless = Lengths(1000, 1e6, 1e6, 0.0, 0.0, 1e4)
    assert decode_workers(1e6, endless, TIMES, TARGETS, 0.0, 1e9, 1e9) == MAX_WORKERS
    nearly = Lengths(1000, 1e6, 1000, 0.0, 0.0, 0.0)
    assert decode_workers(51_180.0, nearly, TIMES, TargetsConfig(1500.0, 1e9), 0.0, 1e9, 1e9) == MAX_WORKERS - 1


def test_times_that_do_not_depend_on_the_load_need_one_worker() -> None:
    flat = StepTimes(24.0, 0.08, 4.8e-6, 20.0, 0.0, 0.0)
    assert decode_workers(40, LENGTHS, flat, TARGETS, 0.0, 1e9, 1e9) == 1
    assert decode_workers(0.5, LENGTHS, flat, TARGETS, 0.0, 1e9, 1e9) == 1


def test_the_prompts_of_a_large_fleet_take_whole_workers() -> None:
    """1000 prompts/s of 2 s each."""
    flat = StepTimes(24.0, 0.08, 4.8e-6, 20.0, 0.0, 0.0)
    assert decode_workers(1000, LENGTHS, flat, TargetsConfig(1500.0, 1e9), 2000.0, 1e12, 1e12) == 2001


def test_a_worker_that_is_exactly_full_and_exactly_fast_enough_is_enough() -> None:
    """40 answers/s of 250 tokens of 20 ms each: half of the time at most 200 run."""
    flat = StepTimes(24.0, 0.08, 4.8e-6, 20.0, 0.0, 0.0)
    lengths, half = Lengths(1000, 1e6, 250, 0.0, 0.0, 1000), TargetsConfig(1500.0, 20.0, 0.5)
    assert decode_workers(40, lengths, flat, half, 0.0, 200_000, 200) == 1


TABLE = {1: 0.20, 2: 0.42, 4: 0.61, 8: 0.76, 16: 0.85, 32: 0.92, 64: 0.97}


def share_that_waits_longer(workers: int, load: float, wait: float, cv2: float, count: int = 200_000) -> float:
    """Of a simulated queue with mean duration 1: gamma for cv2 <= 1, else exponential of two rates."""
    dice = np.random.default_rng(1)
    arrivals = np.cumsum(dice.exponential(1 / load, count))
    if cv2 <= 1:
        durations = dice.gamma(1 / cv2, cv2, count)
    else:
        first = (1 + np.sqrt((cv2 - 1) / (cv2 + 1))) / 2
        fast = dice.random(count) < first
        durations = dice.exponential(np.where(fast, 0.5 / first, 0.5 / (1 - first)))
    free = [0.0] * workers
    late = 0
    for arrival, duration in zip(arrivals.tolist(), durations.tolist(), strict=True):
        begin = max(arrival, heapq.heappop(free))
        late += begin - arrival > wait
        heapq.heappush(free, begin + duration)
    return late / count


def utilisation(workers: int, wait: float, cv2: float, late: float) -> float:
    """The largest load per worker with which at most the share `late` of prompts waits longer than `wait`."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if workers_for(middle * workers, wait, cv2, late) <= workers:
            low = middle
        else:
            high = middle
    return low


@pytest.mark.parametrize(("workers", "expected"), TABLE.items())
def test_the_utilisation_that_workers_carry_is_that_of_the_table(workers: int, expected: float) -> None:
    assert utilisation(workers, wait=1.1, cv2=1.9, late=0.1) == pytest.approx(expected, abs=0.025)


@pytest.mark.parametrize("load", [0.3, 1.7, 6.0, 20.0])
def test_workers_are_as_many_as_a_simulated_queue_needs(load: float) -> None:
    """Give or take one: the formula is none for this distribution."""
    found = workers_for(load, 2.0, 1.9, 0.05)
    simulated = next(n for n in range(int(load) + 1, 99) if share_that_waits_longer(n, load, 2.0, 1.9, 50_000) <= 0.05)
    assert abs(found - simulated) <= 1


def test_no_load_needs_no_worker_and_more_load_never_fewer() -> None:
    counts = [workers_for(load / 4, 1.0, 1.0, 0.1) for load in range(200)]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert all(count > load / 4 for load, count in enumerate(counts) if load)
