"""Makes limits hold for all routers of a service together: each tells the others what callers have taken.

What is told is taken out of the other routers' buckets, so that all of them hold the same, but for what was let in
within INTERVAL_S. A router that starts asks the others for what is left. Event loop only.
"""

import asyncio
import contextlib
from typing import Final

import msgspec

from baton_proto.routers.rates import MAJOR, KeyRates, RateReport, decode_rates, encode_rates
from router.requests.rate_limits import Account, RateLimits
from router.siblings import Siblings
from runtime.discovery.worker_key import new_incarnation
from runtime.end_task import end_tasks
from runtime.nats.client import NatsClient
from runtime.nats.subjects import rates_subject

INTERVAL_S: Final = 0.1
QUESTION: Final = "rates"


class LimitsOfAll:
    """Reports of what was taken here, and what follows from those of others. No I/O."""

    def __init__(self, limits: RateLimits, router_id: str) -> None:
        self._limits = limits
        self._own = (router_id, new_incarnation())
        self._changed: set[str] = set()
        self._heard: dict[str, tuple[int, dict[str, KeyRates]]] = {}  # by router: its incarnation, and what it told
        self._last: dict[str, tuple[KeyRates, float]] = {}  # by key: what was told last, by whomever, and when
        limits.opened = self._opened

    def note(self, key: str) -> None:
        self._changed.add(key)

    def report(self, *, full: bool = False) -> RateReport:
        """What has changed since the last report; `full`: all."""
        keys = list(self._limits.by_key) if full else sorted(self._changed)
        if not full:
            self._changed.clear()
        return RateReport(MAJOR, *self._own, [self._rates(self._limits.by_key[key]) for key in keys])

    def apply(self, report: RateReport) -> None:
        router, incarnation = report.router_id, report.incarnation
        if (router, incarnation) == self._own:
            return
        if self._heard.get(router, (0, {}))[0] != incarnation:
            self._heard[router] = (incarnation, {})
        heard, now_s = self._heard[router][1], self._limits.clock()
        for told in report.keys:
            before, account = heard.get(told.key), self._limits.by_key.get(told.key)
            heard[told.key], self._last[told.key] = told, (told, now_s)
            if account is None:
                continue
            if before is None:
                self._opened(account)
                continue
            for bucket, now, then in zip(account.buckets, _taken(told), _taken(before), strict=True):
                if bucket is not None:
                    bucket.take(max(0, now - then), now_s)

    def _opened(self, account: Account) -> None:
        """Of a caller who is new here, or a router that is: what is left is what the other says."""
        if account.key in self._last:
            told, at_s = self._last[account.key]
            levels = (told.requests_level, told.tokens_level)
            for bucket, level in zip(account.buckets, levels, strict=True):
                if bucket is not None:
                    bucket.lower(level, at_s, self._limits.clock())

    def _rates(self, account: Account) -> KeyRates:
        now_s = self._limits.clock()
        levels = [0.0 if bucket is None else bucket.level(now_s) for bucket in account.buckets]
        return KeyRates(account.key, *account.taken, *levels)


def _taken(rates: KeyRates) -> tuple[int, int]:
    return rates.requests, rates.tokens


class LimitSharing:
    """`start` and `close` surround the router's work."""

    def __init__(self, nats: NatsClient, siblings: Siblings, limits: RateLimits, router_id: str) -> None:
        self._nats = nats
        self._siblings = siblings
        self._all = LimitsOfAll(limits, router_id)
        self._subject = rates_subject(nats.namespace, router_id)
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        limits.changed = self._changed

    async def start(self) -> None:
        async def answer(_payload: bytes) -> bytes:
            return encode_rates(self._all.report(full=True))

        await self._siblings.answer(QUESTION, answer)
        await self._nats.hear(rates_subject(self._nats.namespace), "rate report", decode_rates, self._all.apply)
        for told in await self._siblings.ask(QUESTION):
            with contextlib.suppress(msgspec.DecodeError):  # another release's
                self._all.apply(decode_rates(told))
        self._task = asyncio.create_task(self._run(), name="limit sharing")

    async def close(self) -> None:
        await end_tasks(self._task)

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            await self._nats.publish(self._subject, encode_rates(self._all.report()))
            await asyncio.sleep(INTERVAL_S)

    def _changed(self, key: str) -> None:
        self._all.note(key)
        self._news.set()
