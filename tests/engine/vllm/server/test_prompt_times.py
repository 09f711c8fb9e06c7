"""What first tokens tell of a server's speed, against a server that computes prompts as vLLM does."""

import random
from itertools import count

import pytest

from baton_proto.discovery import TimedStep
from engine.vllm.server.prompt_times import BUSY, TOGETHER_S, PromptTimes
from runtime.config.step_fit import FittedSteps
from runtime.config.step_times import StepTimes

SLOW = StepTimes(prefill_floor_ms=30.0, prefill_token_ms=1.0, prefill_pair_ms=2e-4)  # fifty times the profile


def served(times: StepTimes, budget: int, load: float, seed: int) -> list[TimedStep]:
    """What is made of a hundred prompts that come at random times, `load` as fast as the server takes them. It fills
    steps of at most `budget` tokens with parts of those that wait, in their order, and nobody decodes for long."""
    dice, told, steps = random.Random(seed), PromptTimes(), []
    lengths = [dice.randint(16, 900) for _ in range(100)]
    arrivals, now_s = [], 0.0
    for length in lengths:
        arrivals.append(now_s)
        now_s += dice.expovariate(load) * times.prefill_ms(length, length**2 / 2) / 1000
    done, waiting, now_s, upcoming = dict.fromkeys(range(100), 0), list[int](), 0.0, 0
    while upcoming < 100 or waiting:
        if not waiting:
            now_s = max(now_s, arrivals[upcoming])
        while upcoming < 100 and arrivals[upcoming] <= now_s:
            waiting.append(upcoming)
            upcoming += 1
        tokens, pairs, left = 0, 0.0, budget
        for prompt in waiting:
            part = min(left, lengths[prompt] - done[prompt])
            pairs += part * (done[prompt] + part / 2)
            done[prompt] += part
            tokens, left = tokens + part, left - part
        now_s += times.prefill_ms(tokens, pairs) / 1000
        for prompt in [prompt for prompt in waiting if done[prompt] == lengths[prompt]]:
            waiting.remove(prompt)
            now_s += dice.uniform(0, TOGETHER_S / 3)  # its stream brings it
            step = told.computed(arrivals[prompt], now_s, lengths[prompt], 0, 0, 0)
            steps += [] if step is None else [step]
    return steps


@pytest.mark.parametrize("budget", [256, 2048])
@pytest.mark.parametrize("load", [0.3, 0.9, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_ordinary_traffic_teaches_how_long_a_prompt_takes(budget: int, load: float, seed: int) -> None:
    """A short prompt's time shows where the server has moments without a queue."""
    fit = FittedSteps(StepTimes())
    for step in served(SLOW, budget, load, seed):
        fit.add(step)
        fit.refit()
    for tokens in (100, 500, 900) if load < 0.5 else (500, 900):
        expected = SLOW.prefill_ms(tokens, tokens**2 / 2)
        assert fit.times.prefill_ms(tokens, tokens**2 / 2) == pytest.approx(expected, rel=0.2), tokens


def test_a_prompt_counts_from_the_first_token_of_the_one_before_it_or_from_its_arrival() -> None:
    told = PromptTimes()
    assert told.computed(10.0, 11.0, 100, 32, 0, 0) is None
    assert told.computed(10.5, 13.0, 100, 0, 2, 50) == TimedStep(100, 100 * (32 + 50), 0, 0, 1000.0)
    assert told.computed(20.0, 21.0, 10, 0, 0, 0) == TimedStep(100, 5000, 2, 50, 2000.0)
    told.forget()
    assert told.computed(21.0, 22.0, 10, 0, 0, 0) is None


def test_a_prompt_that_waits_for_no_other_says_nothing_of_a_busy_server() -> None:
    told = PromptTimes()
    assert told.computed(10.0, 11.0, 100, 0, BUSY, 500) is None
    assert told.computed(12.0, 15.0, 100, 0, BUSY + 1, 500) == TimedStep(100, 5000, BUSY, 500, 1000.0)
    assert told.computed(14.9, 15.001, 100, 0, BUSY + 1, 500) is None  # a part of the same step
    assert told.computed(14.9, 16.0, 100, 0, BUSY + 1, 500) is None
    step = told.computed(17.0, 18.0, 100, 0, 0, 0)  # what the one that waited says
    assert step is not None
    assert (step.prompt_tokens, step.sequences, step.step_ms) == (100, BUSY + 1, pytest.approx(999))


def test_prompts_whose_first_tokens_come_together_are_one_step() -> None:
    told, clock = PromptTimes(), count()
    for tokens in (10, 20, 30):
        assert told.computed(0.0, 1.0 + next(clock) * TOGETHER_S / 4, tokens, 0, 0, 0) is None
    step = told.computed(5.0, 6.0, 10, 0, 0, 0)
    assert step is not None
    assert (step.prompt_tokens, step.prompt_pairs) == (60, 700)
    assert step.step_ms == pytest.approx(1000 + 2 * TOGETHER_S / 4 * 1000)
