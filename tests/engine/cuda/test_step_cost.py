"""What benchmarks/step_cost.py measures, on a tiny model, and what it fits."""

import pytest

from benchmarks.step_cost import Point, build, fitted, grid, measure_all, variants


def test_the_fit_finds_the_coefficients_of_steps_that_follow_them() -> None:
    points = grid()
    ms = [
        max(6.2, 0.024 * point.prompt) + 1.5e-6 * point.pairs + point.readers * (0.066 + 4.3e-5 * point.context)
        for point in points
    ]
    found = fitted(points, ms)
    assert (found.floor, found.token, found.pair) == (pytest.approx(6.2), pytest.approx(0.024), pytest.approx(1.5e-6))
    assert (found.sequence, found.context) == (pytest.approx(0.066), pytest.approx(4.3e-5))
    assert found.error == pytest.approx(0, abs=1e-9)


def test_large_graphs_are_tried_where_they_make_a_difference() -> None:
    assert variants(Point(0, 0, 8, 4096), 2048) == [False]
    assert variants(Point(512, 8192, 0, 0), 2048) == [False], "a small graph is enough"
    assert variants(Point(1024, 8192, 8, 4096), 2048) == [True, False]
    assert variants(Point(4096, 8192, 8, 4096), 2048) == [False], "no graph is as large"


@pytest.mark.slow
def test_it_measures_a_tiny_model(capsys: pytest.CaptureFixture[str]) -> None:
    steps, _ = build("tiny", max_tokens=64, max_running=4)
    capsys.readouterr()  # what an engine on a GPU logs
    points = [Point(0, 0, 3, 20), Point(24, 16, 3, 20)]
    found = measure_all(steps, points, count=1)
    assert all(list(costs) == points for costs in found.values())
    assert found[True] == found[False], "64 tokens have a small graph"
    assert len(capsys.readouterr().out.splitlines()) == 3
