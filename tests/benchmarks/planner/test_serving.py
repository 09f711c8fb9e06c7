"""The simulated cluster against what can be reckoned by hand, and against a simulation step by step."""

import heapq

import numpy as np
import pytest

from baton_proto.planner import DECODE, PREFILL
from benchmarks.planner.serving import Hardware, Limits, ServingCluster
from benchmarks.planner.workload import chat_lengths, requests_of
from runtime.config.step_times import StepTimes, token_pairs
from simulator.requests import Requests, alike

ENGINE = StepTimes()


def requests(*rows: tuple[float, int, int]) -> Requests:
    """(arrival s, prompt, output) each."""
    arrival_s, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    return alike(arrival_s.astype(float), prompt, prompt, output)


def cluster(of: Requests, prefill: int, decode: int, kv_tokens: int = 500_000) -> ServingCluster:
    found = ServingCluster(of, Hardware(ENGINE, kv_tokens), Limits(1.0, 0.05), prefill + decode)
    for slot in range(prefill + decode):
        found.open(slot, PREFILL if slot < prefill else DECODE)
    return found


def prefill_s(tokens: int) -> float:
    return max(6, 0.02 * tokens + 0.6e-6 * tokens * tokens) / 1e3


def test_one_request_takes_what_the_formulas_say() -> None:
    found = cluster(requests((1.0, 1000, 101)), 1, 1)
    found.advance(100.0)
    assert found.state.first_s[0] == pytest.approx(1.0 + prefill_s(1000))
    steps_ms = sum(5 + 0.02 + 4.2e-5 * context for context in range(1001, 1101))
    assert found.state.itl.sum() == 1
    itl_ms = np.exp(np.argmax(found.state.itl) * np.log(1.04))
    assert itl_ms == pytest.approx(steps_ms / 100, rel=0.05)
    assert found.totals().met == 1


def test_prompts_wait_for_the_first_idle_worker_in_the_order_of_their_arrival() -> None:
    of = requests_of(np.full(1, 60.0), chat_lengths, 0, bin_s=60)
    found = cluster(of, 2, 20)
    found.advance(1000.0)
    free = [0.0, 0.0]
    expected = []
    for arrival_s, tokens in zip(of.arrival_s.tolist(), of.uncached.tolist(), strict=True):
        end_s = max(arrival_s, heapq.heappop(free)) + prefill_s(tokens)
        heapq.heappush(free, end_s)
        expected.append(end_s)
    assert found.state.first_s == pytest.approx(expected)


def test_sequences_decode_as_a_simulation_step_by_step_has_it() -> None:
    """Ends differ by a step at most: the fluid knows no step boundaries."""
    rows = [(0.01 * number, 200 + 100 * number, 50 + 20 * number) for number in range(12)]
    of = requests(*rows)
    found = cluster(of, 12, 1)
    ends: dict[int, float] = {}
    for tick in range(1, 4000):
        found.advance(tick * 0.001)
        if found.totals().finished > len(ends):
            ends[found.totals().finished] = tick * 0.001
    running: list[list[int]] = []
    now_s, finished, exact = 0.0, 0, {}
    coming = sorted((float(first_s), *row[1:]) for first_s, row in zip(found.state.first_s, rows, strict=True))
    while coming or running:
        while coming and coming[0][0] <= now_s:
            _, prompt, output = coming.pop(0)
            running.append([prompt + 1, output - 1])
        if not running:
            now_s = coming[0][0]
            continue
        now_s += (5 + 0.02 * len(running) + 4.2e-5 * sum(context for context, _ in running)) / 1e3
        running = [[context + 1, left - 1] for context, left in running]
        finished += sum(left == 0 for _, left in running)
        running = [entry for entry in running if entry[1] > 0]
        exact.setdefault(finished, now_s)
    for count, end_s in ends.items():
        assert end_s == pytest.approx(exact[count], abs=0.015)


def test_requests_wait_while_no_decode_worker_has_room() -> None:
    found = cluster(requests((0.0, 600, 200), (0.0, 600, 200)), 2, 1, kv_tokens=1000)
    found.advance(0.5)
    assert len(found.waiting()) == 1
    found.advance(50.0)
    assert found.totals().finished == 2
    assert found.state.workers["reserved"].sum() == 0


def test_a_closed_worker_finishes_what_it_has_and_takes_nothing_new() -> None:
    found = cluster(requests((0.0, 500, 300), (0.5, 500, 300)), 1, 1)
    found.advance(0.1)
    found.close(1)
    assert not found.idle(1)
    found.advance(50.0)
    assert found.idle(1)
    assert found.totals().finished == 1
    assert len(found.waiting()) == 1


def test_the_compiled_loop_takes_the_times_of_the_shared_formulas() -> None:
    """A copy of the loop that numba kept on disk from before a change of runtime/config/step_times.py fails here."""
    found = cluster(requests((0.0, 3000, 2)), 1, 1)
    found.advance(100.0)
    prompt_s = ENGINE.prefill_ms(3000, token_pairs(0, 3000)) / 1e3
    assert found.state.first_s[0] == pytest.approx(prompt_s)
    step_s = ENGINE.decode_ms(1, 3001) / 1e3
    almost = cluster(requests((0.0, 3000, 2)), 1, 1)
    almost.advance(prompt_s + 0.999 * step_s)
    assert almost.totals().finished == 0
    almost.advance(prompt_s + 1.001 * step_s)
    assert almost.totals().finished == 1
