"""How many prefill workers a queue needs, against the table that the formula stands for and against a queue itself."""

import heapq

import numpy as np
import pytest

from planner.policy.queueing import waits_longer, workers_for

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
        if waits_longer(workers, middle * workers, wait, cv2) <= late:
            low = middle
        else:
            high = middle
    return low


@pytest.mark.parametrize(("workers", "expected"), TABLE.items())
def test_the_utilisation_that_workers_carry_is_that_of_the_table(workers: int, expected: float) -> None:
    assert utilisation(workers, wait=1.1, cv2=1.9, late=0.1) == pytest.approx(expected, abs=0.025)


@pytest.mark.parametrize("workers", [1, 3, 10])
@pytest.mark.parametrize("cv2", [0.5, 1.0, 1.9])
def test_as_many_prompts_wait_as_in_a_simulated_queue(workers: int, cv2: float) -> None:
    load = 0.8 * workers
    expected = share_that_waits_longer(workers, load, 1.0, cv2)
    assert waits_longer(workers, load, 1.0, cv2) == pytest.approx(expected, abs=0.05)


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
