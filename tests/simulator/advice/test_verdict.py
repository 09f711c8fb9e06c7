"""What the comparison of layouts says, where the answer is known."""

from dataclasses import replace

import numpy as np
import pytest

from router.placement.weights import Weights
from runtime.config.planner import TargetsConfig
from runtime.config.step_times import StepTimes
from simulator.advice.comparison import Comparison, Standing
from simulator.advice.layouts import layouts, name
from simulator.advice.traffic import RandomTraffic, TraceTraffic
from simulator.advice.verdict import Difference, Point, best_of_each, curve, difference, ranges, recommended
from simulator.stepwise.fleet import Layout, WorkerKind

KIND = WorkerKind(StepTimes())
TWO_GPUS = WorkerKind(StepTimes(prefill_token_ms=0.011, decode_floor_ms=3.0), gpus=2)


def compared(
    prompt: int, output: int, targets: TargetsConfig, gpus: int, rate: float = 5.0
) -> tuple[Comparison, list[Standing]]:
    traffic = RandomTraffic((prompt // 2, prompt * 3 // 2), (output // 2, output * 3 // 2), 3000)
    comparison = Comparison(traffic, targets, Weights(), gpus, 3)
    mixed, splits = layouts([KIND], gpus)
    return comparison, [comparison.standing(layout, rate) for layout in mixed + splits]


def test_splitting_wins_where_tokens_must_come_nearly_as_quickly_as_without_prompts() -> None:
    comparison, standings = compared(2000, 200, TargetsConfig(2000.0, 6.5, 0.9), 8)
    mixed, split = best_of_each(standings)
    gain = difference(split.carried, mixed.carried)
    assert not gain.is_noise
    assert gain.mean > 0.04 * np.mean(mixed.carried)
    assert all(one.layout.prefill for one in recommended(standings))
    assert [one.ahead for one in ranges(curve(comparison, standings))][-1] == "split"


def test_mixed_workers_are_recommended_where_answers_are_long_and_a_split_carries_nearly_as_much() -> None:
    _, standings = compared(100, 800, TargetsConfig(2000.0, 12.0, 0.9), 2)
    mixed, split = best_of_each(standings)
    assert 1.05 > np.mean(mixed.carried) / np.mean(split.carried) > 0.95
    assert not recommended(standings)[0].layout.prefill


def test_where_nobody_is_late_mixed_workers_are_recommended_for_being_simpler() -> None:
    standing = compared(500, 100, TargetsConfig(), 2)[1][0]
    split = Standing(Layout(1, KIND, 1, KIND), standing.scores, standing.carried)
    assert [one.layout.prefill for one in recommended([standing, split])] == [0, 1]


@pytest.mark.parametrize("split", [False, True])
def test_more_gpus_carry_more(split: bool) -> None:
    traffic, targets = RandomTraffic((200, 3000), (50, 300), 4000), TargetsConfig(1000.0, 20.0, 0.95)
    comparison, before = Comparison(traffic, targets, Weights(), 1, 3), [0.0] * 3
    for gpus in (2, 4, 8, 16):
        layout = Layout(gpus // 2, KIND, gpus // 2, KIND) if split else Layout(0, KIND, gpus, KIND)
        carried = comparison.standing(layout, 10.0 * gpus).carried
        assert np.mean(carried) > 1.5 * np.mean(before)
        before = carried


def test_goodput_never_grows_with_tighter_targets() -> None:
    traffic = RandomTraffic((200, 3000), (50, 300), 2000)
    goodputs = []
    for itl_ms in (40.0, 12.0, 8.0):
        comparison = Comparison(traffic, TargetsConfig(1000.0, itl_ms, 0.9), Weights(), 4, 2)
        goodputs.append(comparison.score(Layout(0, KIND, 4, KIND), 40.0, 0).goodput)
    assert goodputs == sorted(goodputs, reverse=True)
    assert goodputs[0] > goodputs[-1]


def test_layouts_are_all_splits_of_all_sizes_of_workers() -> None:
    mixed, splits = layouts([KIND, TWO_GPUS], 4)
    assert [name(one) for one in mixed] == ["4 mixed", "2 mixed x 2 GPUs"]
    assert {name(one) for one in splits} == {
        "1P + 3D",
        "2P + 2D",
        "3P + 1D",
        "1P x 2 GPUs + 2D",
        "1P x 2 GPUs + 1D x 2 GPUs",
        "1P + 1D x 2 GPUs",
        "2P + 1D x 2 GPUs",
    }
    assert all(one.gpus <= 4 for one in mixed + splits)
    assert len(layouts([KIND], 1000)[1]) <= 31


def test_a_difference_is_noise_when_its_interval_holds_zero() -> None:
    assert difference([1.0, 2.0, 3.0], [1.1, 1.9, 3.05]).is_noise
    assert difference([2.0, 3.0, 4.0], [1.0, 2.0, 3.0]) == Difference(1.0, 0.0, False)
    assert difference([10.001, 10.001], [10.0, 10.0]).is_noise


def test_ranges_say_where_who_is_ahead() -> None:
    gains = [Difference(0.0, 1.0, True), Difference(2.0, 0.5, False), Difference(1.0, 0.5, False)]
    points = [Point(float(rate), 10.0, 10.0 + gain.mean, gain) for rate, gain in enumerate(gains, 1)]
    found = ranges(points)
    assert [(one.ahead, one.from_rate, one.to_rate) for one in found] == [("neither", 1, 1), ("split", 2, 3)]
    assert found[1].by == pytest.approx(2 / 12)


def test_parts_of_a_trace_are_drawn_whole_and_in_order() -> None:
    times = np.arange(1000) / 10
    trace = TraceTraffic(times, np.arange(1, 1001), np.full(1000, 5))
    as_it_is, drawn = trace.requests(trace.rate, 0), trace.requests(trace.rate * 2, 3)
    assert as_it_is.arrival_s == pytest.approx(times)
    assert (np.diff(drawn.arrival_s) >= 0).all()
    assert drawn.arrival_s[-1] == pytest.approx(times[-1] / 2, rel=0.06)
    assert len(set(drawn.prompt.tolist())) < len(drawn.prompt)  # some parts came twice
    assert (np.diff(drawn.prompt) == 1).mean() > 0.97


def test_a_trace_finds_its_prefixes_as_far_as_the_caches_hold_them() -> None:
    """Two conversations in turns; the second turn of each repeats the first."""
    prompt = np.array([250, 250, 350, 350])
    trace = TraceTraffic(np.arange(4.0), prompt, prompt, 0.0, [[1, 2, 3], [5, 6, 7], [1, 2, 8, 9], [5, 6, 10, 11]], 100)
    assert trace.requests(1.0, 0, 100_000).uncached.tolist() == [250, 250, 150, 150]
    assert trace.requests(1.0, 0, 500).uncached.tolist() == [250, 250, 150, 250], "of 5 blocks one prefix is half gone"
    assert trace.requests(1.0, 0, 300).uncached.tolist() == [250, 250, 350, 350]
    drawn = trace.requests(1.0, 3, 100_000)
    assert set(zip(drawn.prompt.tolist(), drawn.uncached.tolist(), strict=True)) <= {(250, 250), (350, 150)}


def test_of_a_prompt_that_is_cached_wholly_the_last_token_is_computed() -> None:
    trace = TraceTraffic(np.arange(2.0), np.array([200, 200]), np.array([5, 5]), 0.0, [[1, 2], [1, 2]], 100)
    assert trace.requests(1.0, 0, 1000).uncached.tolist() == [200, 1]


def test_scores_are_those_of_all_requests() -> None:
    """Alone on a worker, each request takes what the formulas say."""
    comparison = Comparison(RandomTraffic((1000, 1000), (11, 11), 300), TargetsConfig(), Weights(), 1, 2)
    at_once = replace(KIND, ahead=0)  # a prompt that meets an answer waits for no second step
    score, times = comparison.score(Layout(0, at_once, 1, at_once), 0.5, 0), StepTimes()
    ttft_ms, itl_ms = times.prefill_ms(1000, 500_000), times.decode_ms(1, 1005.5)
    assert (score.ttft_mean_ms, score.ttft_p50_ms) == pytest.approx((ttft_ms, ttft_ms), rel=0.02)
    assert (score.itl_mean_ms, score.itl_p50_ms) == pytest.approx((itl_ms, itl_ms), rel=0.04)
    assert score.answer_mean_s == pytest.approx((ttft_ms + 10 * itl_ms) / 1e3, rel=0.02)
    assert score.in_time == 1.0
