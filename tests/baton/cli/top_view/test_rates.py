"""Rates between two answers of Status."""

import pytest

from baton.cli.top_view.rates import RateWindow
from baton_proto.generated import inference_pb2 as pb


def status(
    clock_s: float, tokens: int = 0, routers: tuple[str, ...] = ("r",), incarnation: int = 1, **totals: int
) -> pb.StatusResponse:
    worker = pb.WorkerStatus(worker_id="d", incarnation=incarnation, output_tokens=tokens, event_batches=tokens // 10)
    return pb.StatusResponse(
        router_id=routers[0],
        workers=[worker],
        totals=pb.Totals(clock_s=clock_s, output_tokens=tokens, **totals),
        routers=routers,
    )


def test_the_first_answer_has_no_rates() -> None:
    rates = RateWindow().add(status(100.0, tokens=5000))
    assert (rates.output_tokens_per_s, rates.workers["d"].output_tokens_per_s, rates.hit_rate) == (0.0, 0.0, None)


def test_rates_are_differences_over_the_routers_own_time() -> None:
    window = RateWindow()
    window.add(status(100.0, tokens=1000, prompt_tokens=100, cached_tokens=100, requests=3, event_batches=8))
    rates = window.add(status(102.0, tokens=1600, prompt_tokens=300, cached_tokens=150, requests=4, event_batches=9))
    assert (rates.output_tokens_per_s, rates.prompt_tokens_per_s, rates.requests_per_s) == (300.0, 100.0, 0.5)
    assert (rates.event_batches_per_s, rates.hit_rate) == (0.5, 0.25)
    assert (rates.workers["d"].output_tokens_per_s, rates.workers["d"].event_batches_per_s) == (300.0, 30.0)


def test_only_the_last_seconds_count() -> None:
    window = RateWindow(window_s=5.0)
    for second in range(20):
        rates = window.add(status(float(second), tokens=1000 if second >= 3 else 0))
    assert rates.output_tokens_per_s == 0.0
    rates = window.add(status(60.0, tokens=1041))
    assert rates.output_tokens_per_s == pytest.approx(1.0), "two answers far apart are all there is"


def test_counters_of_another_incarnation_began_at_zero() -> None:
    window = RateWindow()
    window.add(status(1.0, tokens=1000, incarnation=1))
    assert window.add(status(2.0, tokens=1030, incarnation=2)).workers["d"].output_tokens_per_s == 1030.0


@pytest.mark.parametrize(
    "restarted",
    [
        status(1.0, tokens=7),
        status(50.0, tokens=7, routers=("another",)),
        status(50.0, tokens=7000, requests=9, routers=("r", "s")),
        status(50.0, tokens=7, requests=0),
    ],
    ids=["clock", "name", "one more", "counters"],
)
def test_a_router_that_was_restarted_gives_no_negative_rates(restarted: pb.StatusResponse) -> None:
    window = RateWindow()
    window.add(status(30.0, tokens=1000, requests=5))
    window.add(status(31.0, tokens=2000, requests=6))
    assert window.add(restarted).output_tokens_per_s == 0.0
