"""How far `baton bench` and engine_throughput are apart."""

import pytest

from benchmarks.bench_agreement import differences


def test_differences_are_shares_of_what_the_engine_reaches() -> None:
    found = differences([100.0, 200.0, 150.0], [98.0, 190.0, 150.0])
    assert found == {"medians": 0.0, "median_pair": pytest.approx(0.02)}
    assert differences([100.0], [103.0])["medians"] == pytest.approx(-0.03)
