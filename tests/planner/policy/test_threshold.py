"""The rule of the policy `threshold`, step by step and against an oracle written from its text."""

import pytest
from hypothesis import given, settings, strategies as st

from baton_proto.planner import DECODE, PREFILL, Interval, LoadSample, Observation, WorkerView
from planner.policy.threshold import ThresholdMemory, ThresholdPolicy
from planner.policy.wanted import Wanted
from runtime.config.planner import PlannerConfig
from tests.planner.observations import observation, sampled, workers

POLICY = ThresholdPolicy(PlannerConfig())


def decided(
    queue: list[float], kv_load: float, prefill: int = 3, decode: int = 3, grace: int = 0, budget: int = 32
) -> tuple[int, int, int]:
    """Wanted prefill and decode workers, and the grace that is left."""
    of = sampled(queue, kv_load, prefill, decode)
    seen = observation(0.0, workers(prefill, decode), of, gpu_budget=budget)
    wanted, memory = POLICY.decide(seen, ThresholdMemory(grace))
    return wanted.prefill, wanted.decode, memory.grace


def test_grace_protects_three_whole_intervals_after_a_decode_worker_was_added() -> None:
    """Where the rule comes from it was two."""
    _, decode, grace = decided([1.0], 0.95)
    assert decode == 4
    for _ in range(3):
        _, decode, grace = decided([1.0], 0.1, decode=4, grace=grace)
        assert decode == 4
    assert decided([1.0], 0.1, decode=4, grace=grace) == (3, 3, 0)


def oracle(samples: list[LoadSample], p: int, d: int, grace: int, budget: int) -> tuple[int, int]:
    """The five sentences of the rule, without looking left or right."""
    queue = sum(sample.queue for sample in samples) / len(samples)
    kv = sum(sample.kv_load for sample in samples) / len(samples)
    new_p, new_d = p, d
    if queue < 0.2 and p > 1:
        new_p -= 1
    if kv < 0.5 and d > 1 and grace == 0:
        new_d -= 1
    last, first = samples[-1].queue, samples[0].queue
    if queue > 5 and new_p + new_d + 1 <= budget and last + 3 * (last - first) > 5:
        new_p += 1
    if kv > 0.9 and new_p + new_d + 1 <= budget:
        new_d += 1
    return new_p, new_d


@given(
    st.lists(
        st.tuples(
            st.floats(0, 20) | st.sampled_from([0.2, 5.0]),
            st.floats(0, 1.5) | st.sampled_from([0.5, 0.9]),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(2, 9),
)
@settings(max_examples=300, deadline=None)
def test_it_does_what_the_text_says(loads: list[tuple[float, float]], p: int, d: int, grace: int, budget: int) -> None:
    samples = [LoadSample(queue, kv, p, d) for queue, kv in loads]
    seen: Observation = observation(
        0.0, workers(p, d), Interval(5.0, 0, 0, 0.0, 0, 0, 0, samples=samples), gpu_budget=budget
    )
    wanted, _ = POLICY.decide(seen, ThresholdMemory(grace))
    assert (wanted.prefill, wanted.decode) == oracle(samples, p, d, grace, budget)


def test_each_change_says_why_and_the_loads_are_told() -> None:
    def answer(queue: list[float], kv_load: float) -> Wanted:
        of = sampled(queue, kv_load, 3, 3)
        return POLICY.decide(observation(0.0, workers(3, 3), of), ThresholdMemory())[0]

    assert answer([0.0, 0.3], 0.25) == Wanted(
        2,
        2,
        (
            "mean queue 0.15 is below 0.2: one prefill worker less",
            "mean KV load 0.25 is below 0.5: one decode worker less",
        ),
        {"queue": 0.15, "kv_load": 0.25},
    )
    assert answer([6.0, 7.0], 1.25) == Wanted(
        4,
        4,
        (
            "mean queue 6.5 is above 5: one prefill worker more",
            "mean KV load 1.25 is above 0.9: one decode worker more",
        ),
        {"queue": 6.5, "kv_load": 1.25},
    )


def test_an_interval_without_samples_changes_nothing() -> None:
    memory = ThresholdMemory(2)
    wanted, after = POLICY.decide(observation(0.0, workers(3, 4)), memory)
    assert wanted == Wanted(3, 4, ("nothing was sampled in this interval",))
    assert after == memory


@pytest.mark.parametrize(
    ("queue", "kv_load", "budget", "counts"),
    [
        (9.0, 0.7, 16, (3, 2)),
        (9.0, 0.7, 15, (2, 2)),
        (1.0, 0.95, 14, (2, 3)),
        (1.0, 0.95, 13, (2, 2)),
        (9.0, 0.95, 18, (3, 3)),
        (9.0, 0.95, 17, (3, 2)),
        (0.0, 0.95, 10, (1, 3)),
        (0.0, 0.95, 9, (1, 2)),
        (9.0, 0.1, 14, (3, 1)),
        (9.0, 0.1, 13, (2, 1)),
    ],
)
def test_the_budget_counts_the_gpus_of_each_role(
    queue: float, kv_load: float, budget: int, counts: tuple[int, int]
) -> None:
    """Prefill workers take 4 and decode workers 2; two of each hold 12."""
    views = [*workers(2, 0, gpus=4), *workers(0, 2, gpus=2)]
    seen = observation(0.0, views, sampled([queue], kv_load, 2, 2), gpu_budget=budget)
    wanted, _ = POLICY.decide(seen, ThresholdMemory())
    assert (wanted.prefill, wanted.decode) == counts
    new = observation(0.0, views, seen.interval, gpu_budget=budget, gpus_per_worker={PREFILL: 4, DECODE: 2})
    assert POLICY.decide(new, ThresholdMemory())[0] == wanted


def test_a_queue_that_falls_to_the_bound_in_three_intervals_adds_nothing() -> None:
    assert decided([8.0, 7.25], 0.7) == (3, 3, 0)
    assert decided([8.0, 7.3], 0.7) == (4, 3, 0)


def test_a_mean_queue_at_the_bound_adds_nothing_even_while_it_grows() -> None:
    assert decided([4.0, 6.0], 0.7) == (3, 3, 0)
    assert decided([4.1, 6.0], 0.7) == (4, 3, 0)


def test_what_is_under_way_is_named() -> None:
    of = sampled([9.0], 0.95, 3, 3)
    for busy in (
        WorkerView("w", DECODE, "draining", 0.0),
        WorkerView("w", DECODE, "starting", 0.0),
        WorkerView("w", DECODE, "sleeping", 0.0, effect="wake"),
    ):
        wanted, _ = POLICY.decide(observation(0.0, [*workers(3, 3), busy], of), ThresholdMemory())
        assert wanted.reasons == ("a change is under way",)
        assert wanted.figures == {"queue": 9.0, "kv_load": 0.95}
    asleep = WorkerView("w", DECODE, "sleeping", 0.0)
    wanted, _ = POLICY.decide(observation(0.0, [*workers(3, 3), asleep], of), ThresholdMemory())
    assert (wanted.prefill, wanted.decode) == (4, 4)
    for prefill, decode in ((3, 3), (4, 2)):
        samples = [LoadSample(9, 0.95, 4, 3), LoadSample(9, 0.95, prefill, decode)]
        changed = Interval(5.0, 0, 0, 0.0, 0, 0, 0, samples=samples)
        wanted, _ = POLICY.decide(observation(0.0, workers(4, 3), changed), ThresholdMemory())
        assert wanted.reasons == ("the number of workers changed within this interval",)
