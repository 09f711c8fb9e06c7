"""Sizes from a demand, against direct simulations of the cluster."""

import numpy as np
import pytest

from planner.policy.sizing import Lengths, decode_workers, prefill_workers, prompt_time
from runtime.config.planner import TargetsConfig
from runtime.config.serving import MockConfig
from runtime.config.step_times import StepTimes
from simulator.day import Setting, follow
from simulator.fleet import Delays
from simulator.serving import Hardware, Limits
from simulator.workload import chat_lengths, requests_of

ENGINE = MockConfig(speed_up=0.25)
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


def test_workers_whose_memory_is_small_are_sized_by_it() -> None:
    roomy = decode_workers(40, LENGTHS, TIMES, TARGETS, 0.0, 1e9, 1e9)
    tight = decode_workers(40, LENGTHS, TIMES, TARGETS, 0.0, 40_000, 1e9)
    few = decode_workers(40, LENGTHS, TIMES, TARGETS, 0.0, 1e9, 20)
    assert tight > roomy
    assert few > roomy


def test_workers_that_run_the_prompts_themselves_are_more() -> None:
    alone = decode_workers(40, LENGTHS, TIMES, TARGETS, 0.0, 1e9, 1e9)
    both = decode_workers(40, LENGTHS, TIMES, TARGETS, prompt_time(LENGTHS, TIMES).mean_ms, 1e9, 1e9)
    assert both >= alone + 40 * prompt_time(LENGTHS, TIMES).mean_ms / 1e3


def test_what_is_cached_needs_no_prefill() -> None:
    cached = Lengths(1000, 2e6, 200, 0.8, 0.0, 1100)
    fresh = Lengths(1000, 2e6, 200, 0.0, 0.0, 1100)
    assert prompt_time(cached, TIMES).mean_ms < 0.5 * prompt_time(fresh, TIMES).mean_ms


def test_a_target_that_no_number_of_workers_meets_still_gives_a_number() -> None:
    hopeless = TargetsConfig(ttft_ms=1, itl_ms=1)
    assert 0 < prefill_workers(40, prompt_time(LENGTHS, TIMES), hopeless) < 100
    assert 0 < decode_workers(40, LENGTHS, TIMES, hopeless, 0.0, 1e9, 1e9) < 100


def test_no_requests_need_nobody() -> None:
    assert prefill_workers(0, prompt_time(LENGTHS, TIMES), TARGETS) == 0
    assert decode_workers(0, LENGTHS, TIMES, TARGETS, 0.0, 1e9, 1e9) == 0
