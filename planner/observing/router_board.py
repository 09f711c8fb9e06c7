"""The sum of the routers' reports: the queue now, and the totals of the interval between two observations.

Because routers report totals, an interval is the difference of two reports of each router, and a lost report changes
nothing. An interval's length is measured by the routers' own clocks.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from baton_proto.planner import Interval, LoadSample, Queue
from baton_proto.routers.router_report import RouterReport, RouterTotals, decode_router_report, percentile_ms
from baton_proto.token_counts import TokenCounts
from runtime.nats.client import NatsClient
from runtime.nats.subjects import router_subject
from runtime.within import happens

SILENT_S = 5.0  # a router silent for longer is left out of the sums

COUNTED = {*RouterTotals.__struct_fields__} & {*Interval.__struct_fields__}  # an interval has their differences


@dataclass(slots=True)
class _Heard:
    base: RouterReport  # where the current interval began
    last: RouterReport
    at_s: float  # monotonic, of `last`


class RouterBoard:
    """The last reports of all routers. For use in the event loop only."""

    def __init__(self, nats: NatsClient) -> None:
        self._nats = nats
        self._routers: dict[tuple[str, int], _Heard] = {}
        self._heard_s: float | None = None
        self._news = asyncio.Event()

    async def start(self) -> None:
        await self._nats.hear(
            router_subject(self._nats.namespace), "router report", decode_router_report, self._receive
        )

    async def wait_for_news(self, timeout_s: float) -> None:
        """Returns when a report has come since the last call, at the latest after `timeout_s`."""
        await happens(self._news, timeout_s)
        self._news.clear()

    def age_s(self) -> float | None:
        """Seconds since the last report of any router; None: there was none."""
        return None if self._heard_s is None else time.monotonic() - self._heard_s

    def waiting(self) -> int:
        """Requests in the routers' queues."""
        return sum(heard.last.queue.waiting for heard in self._talking())

    def queue(self) -> Queue:
        """The sum of the routers' queues. Waiting prompts are taken to be cached as much as started ones."""
        talking = self._talking()
        ran = TokenCounts()
        for heard in talking:
            ran.add(heard.last.totals)
        waiting_tokens = sum(heard.last.queue.prompt_tokens for heard in talking)
        return Queue(
            self.waiting(),
            round(waiting_tokens * (1 - (ran.hit_rate or 0.0))),
            max((heard.last.queue.oldest_s for heard in talking), default=0.0),
        )

    def take_interval(self, samples: list[LoadSample]) -> Interval | None:
        """What happened since the last call; None when no report has come since. A new router's interval begins with
        its first report."""
        pairs = [(heard.base, heard.last) for heard in self._routers.values()]
        duration_s = max((last.uptime_s - base.uptime_s for base, last in pairs), default=0.0)
        if duration_s <= 0:
            return None
        for key, heard in list(self._routers.items()):
            heard.base = heard.last
            if heard.last.leaving or heard.at_s < time.monotonic() - SILENT_S:
                del self._routers[key]

        def total(name: str) -> int:
            return sum(getattr(last.totals, name) - getattr(base.totals, name) for base, last in pairs)

        ttft = _counted([(base.totals.ttft, last.totals.ttft) for base, last in pairs])
        itl = _counted([(base.totals.itl, last.totals.itl) for base, last in pairs])
        return Interval(
            duration_s=duration_s,
            **{name: total(name) for name in COUNTED},
            ttft_p50_ms=percentile_ms(ttft, 0.5),
            ttft_p90_ms=percentile_ms(ttft, 0.9),
            itl_p50_ms=percentile_ms(itl, 0.5),
            itl_p90_ms=percentile_ms(itl, 0.9),
            samples=samples,
        )

    def _talking(self) -> list[_Heard]:
        since_s = time.monotonic() - SILENT_S
        return [heard for heard in self._routers.values() if heard.at_s >= since_s and not heard.last.leaving]

    def _receive(self, report: RouterReport) -> None:
        self._heard_s = now_s = time.monotonic()
        heard = self._routers.get((report.router_id, report.incarnation))
        if heard is None:
            self._routers[report.router_id, report.incarnation] = _Heard(report, report, now_s)
        else:
            heard.last, heard.at_s = report, now_s
        self._news.set()


def _counted(pairs: list[tuple[Sequence[int], Sequence[int]]]) -> list[int]:
    """The sum over (before, after) pairs of histograms of their differences. An empty histogram counts as zeros."""
    size = max((len(last) for _, last in pairs), default=0)
    counts = [0] * size
    for base, last in pairs:
        for bucket, count in enumerate(last):
            counts[bucket] += count - (base[bucket] if bucket < len(base) else 0)
    return counts
