"""What benchmarks/step_cost.py measures, on a tiny model, and what it fits."""

import pytest

from benchmarks.step_cost import Point, Switches, build, fitted, grid, measure_all, variants
from engine.cuda import cuda_build
from engine.kernels import decode_attention


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


def test_a_switch_is_tried_where_it_makes_a_difference() -> None:
    assert variants(Point(0, 0, 8, 4096), 2048) == [Switches(False, False)]
    assert variants(Point(64, 0, 32, 9216), 2048) == [Switches(False, False)], "prompt attention takes no time"
    assert variants(Point(512, 8192, 0, 0), 2048) == [Switches(False, False)]
    assert variants(Point(64, 8192, 8, 4096), 2048) == [Switches(True, False), Switches(False, False)], "it takes some"
    assert len(variants(Point(1024, 8192, 8, 4096), 2048)) == 4
    assert variants(Point(4096, 8192, 8, 4096), 2048) == [Switches(True, False), Switches(False, False)]


@pytest.mark.slow
def test_it_measures_a_tiny_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_build, "ATTEND_AT_ONCE", False)  # it sets it, for its whole process
    rules = decode_attention.BESIDE_PROMPTS
    steps, _ = build("tiny", max_tokens=64, max_running=4)
    points = [Point(0, 0, 3, 20), Point(24, 16, 3, 20)]
    found = measure_all(steps, points, count=1)
    assert all(list(costs) == points for costs in found.values())
    apart, together = found[Switches(False, False)], found[Switches(True, True)]
    assert together[points[0]] is apart[points[0]]
    assert together[points[1]] is not apart[points[1]]
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert decode_attention.BESIDE_PROMPTS is rules
