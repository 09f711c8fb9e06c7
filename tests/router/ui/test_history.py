from baton_proto.routers.router_report import BUCKETS, RouterTotals, bucket_of
from router.requests.admission import QueueView
from router.ui.history import POINTS, WINDOW, History

QUEUE = QueueView(3, 5, 64, 1.0)


def totals() -> RouterTotals:
    return RouterTotals(ttft=[0] * BUCKETS, itl=[0] * BUCKETS)


def test_a_point_has_the_rates_since_the_one_before() -> None:
    history, counts = History(), totals()
    assert history.sample(100.0, 10.0, counts, 50, 7, QUEUE, (1, 2), None) is None
    counts.arrivals, counts.input_tokens = 6, 600
    point = history.sample(102.0, 12.0, counts, 150, 4000, QUEUE, (1, 2), (2, 3))
    assert point is not None
    assert (point.time_s, point.requests_per_s, point.prompt_tokens_per_s) == (102.0, 3.0, 300.0)
    assert (point.output_tokens_per_s, point.kv_bytes_per_s) == (50.0, 2000)
    assert (point.waiting, point.running, point.prefill_ready, point.decode_ready) == (3, 5, 1, 2)
    assert (point.prefill_wanted, point.decode_wanted) == (2, 3)
    assert point.ttft_p50_ms is None


def test_counts_of_other_routers_are_compared_with_their_own_alone() -> None:
    history, counts = History(), totals()
    history.sample(1.0, 1.0, counts, 0, 0, QUEUE, (1, 1), None, {"a"})
    counts.arrivals, counts.ttft[9] = 5000, 100
    assert history.sample(2.0, 2.0, counts, 9000, 0, QUEUE, (1, 1), None, {"a", "b"}) is None
    point = history.sample(3.0, 3.0, counts, 9001, 0, QUEUE, (1, 1), None, {"a", "b"})
    assert point is not None
    assert (point.requests_per_s, point.output_tokens_per_s, point.ttft_p50_ms) == (0.0, 1.0, None)


def test_percentiles_are_those_of_the_last_seconds_alone() -> None:
    history, counts = History(), totals()
    for second in range(WINDOW + 3):
        if second == 1:
            counts.ttft[bucket_of(100.0)] += 9
            counts.ttft[bucket_of(900.0)] += 1
        point = history.sample(second, second, counts, 0, 0, QUEUE, (1, 1), None)
        if second in (1, WINDOW):
            assert point is not None
            assert point.ttft_p50_ms is not None
            assert 90 < point.ttft_p50_ms < 110
            assert point.ttft_p90_ms == point.ttft_p50_ms
            assert point.itl_p50_ms is None
    assert history.points[-1].ttft_p50_ms is None


def test_it_holds_so_many_points_and_no_more() -> None:
    history = History()
    for second in range(POINTS + 50):
        history.sample(second, second, totals(), 0, 0, QUEUE, (1, 1), None)
    assert len(history.points) == POINTS
    assert history.points[-1].time_s == POINTS + 49
