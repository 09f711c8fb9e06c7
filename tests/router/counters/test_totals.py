"""What a router counts for the planner."""

import pytest

from baton_proto.router_report import BUCKETS, bucket_of, percentile_ms
from router.counters.totals import Totals


def test_a_request_is_counted_when_it_comes_when_it_starts_and_when_it_ends() -> None:
    totals = Totals()
    totals.arrived(100)
    totals.arrived(30)
    totals.started(100, 64, local_prefill=False)
    totals.first_token(0.2)
    totals.ended(11, decode_s=0.5)
    counted = totals.snapshot()
    assert (counted.arrivals, counted.input_tokens, counted.input_tokens_squared) == (2, 130, 100.0**2 + 30.0**2)
    assert (counted.started, counted.started_tokens, counted.cached_tokens, counted.local_prefills) == (1, 100, 64, 0)
    assert (counted.finished, counted.output_tokens) == (1, 11)
    assert percentile_ms(counted.ttft, 0.9) == pytest.approx(200, rel=0.06)
    assert percentile_ms(counted.itl, 0.5) == pytest.approx(50, rel=0.06)


def test_an_answer_without_a_token_counts_nowhere_and_one_of_a_single_token_has_no_time_between_tokens() -> None:
    totals = Totals()
    totals.ended(0, 0.0)
    assert totals.snapshot().finished == 0
    totals.ended(1, 0.0)
    counted = totals.snapshot()
    assert (counted.finished, sum(counted.itl)) == (1, 0)


def test_a_percentile_is_the_bucket_below_which_the_share_lies() -> None:
    counts = [0] * BUCKETS
    counts[bucket_of(10)], counts[bucket_of(1000)] = 90, 10
    assert percentile_ms(counts, 0.9) == pytest.approx(10, rel=0.06)
    assert percentile_ms(counts, 0.91) == pytest.approx(1000, rel=0.06)
    assert percentile_ms([0] * BUCKETS, 0.5) is None
    assert bucket_of(1e9) == BUCKETS - 1
    assert bucket_of(0) == 0
