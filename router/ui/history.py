"""Points of the page's curves: one per second, over the last minutes."""

from collections import deque
from collections.abc import Collection
from typing import Final

from msgspec import Struct

from baton_proto.routers.router_report import RouterTotals, percentile_ms
from router.requests.admission import QueueView

POINTS: Final = 600
WINDOW: Final = 10  # points that percentiles are taken over

Counts = tuple[int, ...]


class Point(Struct, frozen=True, array_like=True):
    """Rates are those of the last second, percentiles those of the last WINDOW seconds (None: nothing was counted)."""

    time_s: float  # Unix
    requests_per_s: float
    prompt_tokens_per_s: float  # of arrivals
    output_tokens_per_s: float
    kv_bytes_per_s: float  # between workers, counted when the first token comes
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    itl_p50_ms: float | None
    itl_p90_ms: float | None
    waiting: int
    running: int
    prefill_ready: int
    decode_ready: int
    prefill_wanted: int | None  # by the planner; None: not known
    decode_wanted: int | None


class History:
    """No clock: the caller says when it samples."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=POINTS)
        self._latencies: deque[tuple[Counts, Counts]] = deque(maxlen=WINDOW + 1)  # TTFT and ITL histograms
        self._before: tuple[float, Counts] | None = None
        self._counted_by: Collection[object] = ()

    def sample(
        self,
        time_s: float,
        clock_s: float,
        totals: RouterTotals,
        streamed_tokens: int,
        kv_bytes: int,
        queue: QueueView,
        ready: tuple[int, int],
        wanted: tuple[int, int] | None,
        counted_by: Collection[object] = (),
    ) -> Point | None:
        """Adds the next point. `clock_s`: monotonic. `kv_bytes`: since the last call. `counted_by`: the routers whose
        totals these are. None for the first call, and for others' totals than the last ones, because there is nothing
        to compare with."""
        if counted_by != self._counted_by:
            self._counted_by, self._before = counted_by, None
            self._latencies.clear()
        counts = (totals.arrivals, totals.input_tokens, streamed_tokens)
        before, self._before = self._before, (clock_s, counts)
        self._latencies.append((tuple(totals.ttft), tuple(totals.itl)))
        if before is None or clock_s <= before[0]:
            return None
        seconds = clock_s - before[0]
        rates = [round((now - then) / seconds, 1) for now, then in zip(counts, before[1], strict=True)]
        (ttft_then, itl_then), (ttft_now, itl_now) = self._latencies[0], self._latencies[-1]
        ttft, itl = _differences(ttft_now, ttft_then), _differences(itl_now, itl_then)
        point = Point(
            time_s=round(time_s, 2),
            requests_per_s=rates[0],
            prompt_tokens_per_s=rates[1],
            output_tokens_per_s=rates[2],
            kv_bytes_per_s=round(kv_bytes / seconds),
            ttft_p50_ms=percentile_ms(ttft, 0.5),
            ttft_p90_ms=percentile_ms(ttft, 0.9),
            itl_p50_ms=percentile_ms(itl, 0.5),
            itl_p90_ms=percentile_ms(itl, 0.9),
            waiting=queue.waiting,
            running=queue.running,
            prefill_ready=ready[0],
            decode_ready=ready[1],
            prefill_wanted=wanted[0] if wanted else None,
            decode_wanted=wanted[1] if wanted else None,
        )
        self.points.append(point)
        return point


def _differences(now: Counts, then: Counts) -> Counts:
    return tuple(later - earlier for later, earlier in zip(now, then, strict=True))
