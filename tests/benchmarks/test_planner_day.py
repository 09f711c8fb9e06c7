"""What the benchmark of the planner's days makes of its runs."""

import numpy as np
import pytest

from benchmarks.planner.case import Result
from benchmarks.planner.oracle import smallest
from benchmarks.planner.workload import chat_lengths, day_of, requests_of
from benchmarks.planner_day import summary


def result(policy: str = "slo", seed: int = 0, **changes: float) -> Result:
    given = {
        "scale": 1.0, "requests": 1000, "attainment": 0.995, "ttft_attainment": 0.995, "gpu_hours": 120.0,
        "oracle_gpu_hours": 100.0, "actions": 200, "reversals": 1, "most_gpus": 9, "seconds": 1.0,
    }  # fmt: skip
    return Result(day=0, seed=seed, policy=policy, **(given | changes))


@pytest.mark.parametrize(
    "changes", [{"attainment": 0.98}, {"gpu_hours": 126.0}, {"actions": 401}, {"reversals": 2, "actions": 150}]
)
def test_a_seed_that_misses_a_goal_misses_the_day(changes: dict[str, float]) -> None:
    assert summary([result(), result(seed=1)])[0].goals_met is True
    assert summary([result(), result(seed=1, **changes)])[0].goals_met is False


def test_only_our_policy_has_goals() -> None:
    assert [row.goals_met for row in summary([result("oracle"), result("threshold")])] == [None, None]


def test_the_oracle_takes_the_fewest_that_carry_the_rate() -> None:
    assert smallest(25.0, [10, 20, 30], [12, 24, 36]) == (3, 3)
    assert smallest(0.0, [10, 20], [12, 24]) == (1, 1)


def test_arrivals_are_as_many_as_the_rates_say_and_in_order() -> None:
    rates = day_of(np.repeat([1.0, 3.0], 144), 1)
    requests = requests_of(rates, chat_lengths, 0, hit_rate=0.25)
    assert len(requests.arrival_s) == pytest.approx(3 * 86400, rel=0.01)
    assert (np.diff(requests.arrival_s) >= 0).all()
    assert requests.uncached.sum() == pytest.approx(0.75 * requests.prompt.sum(), rel=0.01)
    assert requests.prompt.mean() == pytest.approx(1000, rel=0.03)
