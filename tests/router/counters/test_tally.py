"""What a router counts of its requests: for the planner, for Prometheus, for status."""

import asyncio
import time
from types import SimpleNamespace
from typing import cast

import pytest

from baton_proto.routers.router_report import BUCKETS, bucket_of, percentile_ms
from baton_proto.token_counts import TokenCounts
from router.counters.metrics import OUTCOMES, RouterMetrics
from router.counters.tally import RequestTally, Tally
from router.counters.usage import Payer
from router.placement.assignment import Assignment
from router.placement.cost import ALONE, SHORT
from runtime.discovery.worker_key import WorkerKey
from runtime.errors import (
    BatonError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    ProtocolError,
    UnavailableError,
)


def assignment(decode: WorkerKey = ("d", 1), reason: int = ALONE) -> Assignment:
    placement = SimpleNamespace(decode=decode, prefill=None, reason=reason, ttft_ms=5.0)
    return cast(Assignment, SimpleNamespace(link=SimpleNamespace(worker=decode), prefill=None, placement=placement))


def test_a_request_is_counted_when_it_comes_when_it_starts_and_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    metrics = RouterMetrics()
    tally, _ = Tally(metrics, 0, 100), Tally(metrics, 1, 30)
    tally.attempt()
    tally.placed(assignment(), 0.1)
    tally.prompt_done(assignment().placement, TokenCounts(100, 64), None)
    now_s += 0.2
    tally.output(assignment(), 1)
    now_s += 0.5
    tally.output(assignment(), 10)
    tally.ended()
    counted = metrics.totals
    assert (counted.arrivals, counted.input_tokens, counted.input_tokens_squared) == (2, 130, 100.0**2 + 30.0**2)
    assert (counted.started, counted.prompt_tokens, counted.cached_tokens, counted.local_prefills) == (1, 100, 64, 0)
    assert (counted.finished, counted.output_tokens) == (1, 11)
    assert percentile_ms(counted.ttft, 0.9) == pytest.approx(200, rel=0.06)
    assert percentile_ms(counted.itl, 0.5) == pytest.approx(50, rel=0.06)


def test_a_replay_does_not_count_its_prompt_again() -> None:
    metrics = RouterMetrics()
    tally = Tally(metrics, 0, 100)
    short = assignment(reason=SHORT).placement
    tally.attempt()
    tally.prompt_done(short, TokenCounts(100, 32), None)
    tally.prompt_done(short, TokenCounts(100, 100), None)
    counted = metrics.totals
    assert (counted.started, counted.prompt_tokens, counted.cached_tokens, counted.local_prefills) == (1, 100, 32, 1)
    assert tally.tokens.cached_tokens == 32


def test_an_answer_without_a_token_counts_nowhere_and_one_of_a_single_token_has_no_time_between_tokens() -> None:
    metrics = RouterMetrics()
    Tally(metrics, 0, 10).ended()
    assert metrics.totals.finished == 0
    single = Tally(metrics, 0, 10)
    single.output(assignment(), 1)
    single.ended()
    counted = metrics.totals
    assert (counted.finished, sum(counted.itl)) == (1, 0)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "completed"),
        (GeneratorExit(), "cancelled"),
        (asyncio.CancelledError(), "cancelled"),
        (InvalidRequestError("prompt", "x"), "invalid"),
        (OverloadedError("queue", 1, 1.0), "overloaded"),
        (UnavailableError("x"), "unavailable"),
        (DeadlineError("x", 1.0), "deadline"),
        (ProtocolError("worker w", "x"), "failed"),
        (ValueError(), "failed"),
    ],
)
def test_each_way_in_which_a_request_ends_is_an_outcome_that_prometheus_sees(
    error: BaseException | None, outcome: str
) -> None:
    metrics = RouterMetrics()
    tally = RequestTally(metrics, "r", 7)
    tally.__exit__(type(error) if error else None, error, None)
    assert {name: count for name, count in metrics.requests.items() if count} == {outcome: 1}
    assert f'baton_router_requests_total{{outcome="{outcome}"}} 1.0' in metrics.exposition().decode()
    assert set(metrics.requests) == set(OUTCOMES.values())


def test_usage_counts_the_prompt_once_and_the_output_of_all_choices() -> None:
    metrics = RouterMetrics()
    with RequestTally(metrics, "r", 100, Payer("key-1", "acme", "tiny")) as tally:
        for cached_tokens in (64, 32):
            choice = tally.choice(0)
            choice.attempt()
            choice.prompt_done(assignment().placement, TokenCounts(cached_tokens=cached_tokens), None)
            choice.output(assignment(), 5)
    assert tally.tokens == TokenCounts(100, 32, 10)
    text = metrics.exposition().decode()
    for kind, tokens in (("prompt", 100), ("cached", 32), ("output", 10)):
        assert f'baton_router_{kind}_tokens_total{{key="key-1",model="tiny",tenant="acme"}} {tokens}.0' in text


def test_a_refusal_is_counted_by_its_reason() -> None:
    metrics = RouterMetrics()
    metrics.answered("http", "200")
    metrics.answered("http", "400", InvalidRequestError("n", "x"))
    metrics.answered("http", "500", BatonError("x"))
    text = metrics.exposition().decode()
    assert 'baton_router_refusals_total{reason="invalid"} 1.0' in text
    assert 'baton_router_responses_total{api="http",code="500"} 1.0' in text


def test_a_percentile_is_the_bucket_below_which_the_share_lies() -> None:
    counts = [0] * BUCKETS
    counts[bucket_of(10)], counts[bucket_of(1000)] = 90, 10
    assert percentile_ms(counts, 0.9) == pytest.approx(10, rel=0.06)
    assert percentile_ms(counts, 0.91) == pytest.approx(1000, rel=0.06)
    assert percentile_ms([0] * BUCKETS, 0.5) is None
    assert bucket_of(1e9) == BUCKETS - 1
    assert bucket_of(0) == 0
