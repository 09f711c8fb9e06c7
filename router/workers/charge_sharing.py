"""Keeps several routers from herding onto one worker: each router tells the others what it has charged to whom.

Every router publishes its changed totals, at most once per INTERVAL_S, and all its totals once a second as a sign of
life. What another router tells stays in the ledger until the router tells something else, leaves, or is silent for
`ttl_s`; after that its requests end, too, and the workers' own reports suffice. A router that hears of no other
publishes signs of life alone. Event loop only.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

import msgspec
import structlog

from baton_proto.routers.charges import MAJOR, ChargeReport, WorkerCharge, decode_charges, encode_charges
from router.workers.account import NOTHING, Totals
from router.workers.load import LoadLedger
from runtime.discovery.worker_key import WorkerKey, new_incarnation
from runtime.end_task import end_tasks
from runtime.nats.client import NATS_ERRORS, NatsClient
from runtime.nats.skipped import skipped
from runtime.nats.subjects import charges_subject
from runtime.within import happens

# Between two messages of one router: less than a prompt takes, so that routers do not herd for longer, and at most 200
# small messages a second.
INTERVAL_S = 0.005
SIGN_OF_LIFE_S = 1.0
TTL_S = 3.0  # three signs of life

log = structlog.get_logger()


class ForeignCharges:
    """What other routers have told, kept in the ledger. No I/O."""

    def __init__(self, ledger: LoadLedger, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger = ledger
        self._ttl_s = ttl_s
        self._clock = clock
        self._heard_s: dict[str, float] = {}  # by router

    @property
    def routers(self) -> set[str]:
        """Their ids."""
        return {router.rpartition("/")[0] for router in self._heard_s}

    def apply(self, report: ChargeReport) -> bool:
        """Takes a report. Returns whether its router was not known. Two routers with the same id are told apart by
        their incarnations."""
        router = f"{report.router_id}/{report.incarnation}"
        if report.leaving:
            self._forget(router)
            return False
        new = router not in self._heard_s
        self._heard_s[router] = self._clock()
        self._ledger.num_routers = 1 + len(self._heard_s)
        told = {(charge.worker_id, charge.incarnation): _totals(charge) for charge in report.workers}
        if report.full:
            told |= dict.fromkeys(self._ledger.foreign(router) - told.keys(), NOTHING)
        for worker, totals in told.items():
            self._ledger.set_foreign(router, worker, totals)
        return new

    def expire(self) -> None:
        too_long_ago_s = self._clock() - self._ttl_s
        for router in [router for router, heard_s in self._heard_s.items() if heard_s < too_long_ago_s]:
            log.warning("another router has gone silent; its charges are forgotten", router=router, ttl_s=self._ttl_s)
            self._forget(router)

    def _forget(self, router: str) -> None:
        self._heard_s.pop(router, None)
        self._ledger.num_routers = 1 + len(self._heard_s)
        for worker in self._ledger.foreign(router):
            self._ledger.set_foreign(router, worker, NOTHING)


class ChargeSharing:
    """`news` is set when the ledger's own charges have changed. `start` and `close` surround the router's work."""

    def __init__(
        self, nats: NatsClient, ledger: LoadLedger, news: asyncio.Event, router_id: str, ttl_s: float = TTL_S
    ) -> None:
        self.malformed_reports = 0
        self.others = ForeignCharges(ledger, ttl_s)
        self._nats = nats
        self._ledger = ledger
        self._router_id = router_id
        self._incarnation = new_incarnation()
        self._subject = charges_subject(nats.namespace, router_id)
        self._sign_of_life_s = min(SIGN_OF_LIFE_S, ttl_s / 3)
        self._news = news
        self._say_all = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._nats.subscribe(charges_subject(self._nats.namespace), self._receive)
        self._nats.on_reconnect(self._greet)
        self._greet()
        self._task = asyncio.create_task(self._run(), name="charge sharing")

    async def close(self) -> None:
        await end_tasks(self._task)
        await self._publish({}, full=True, leaving=True)
        with contextlib.suppress(*NATS_ERRORS):
            await self._nats.flush()

    async def _run(self) -> None:
        said_all_s = 0.0
        while True:
            await happens(self._news, self._sign_of_life_s)
            self._news.clear()
            self.others.expire()
            now = time.monotonic()
            if self._say_all or now - said_all_s >= self._sign_of_life_s:
                said_all_s, self._say_all = now, False
                self._ledger.take_changed()
                await self._publish(self._ledger.charged(), full=True)
            elif self.others.routers:
                await self._publish(self._ledger.take_changed(), full=False)
            await asyncio.sleep(INTERVAL_S)

    async def _publish(self, charges: Mapping[WorkerKey, Totals], full: bool, leaving: bool = False) -> None:
        workers = [WorkerCharge(*worker, *totals) for worker, totals in charges.items()]
        report = ChargeReport(MAJOR, self._router_id, self._incarnation, workers, full, leaving)
        await self._nats.publish(self._subject, encode_charges(report))

    def _receive(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        try:
            report = decode_charges(payload)
        except msgspec.DecodeError as error:
            self.malformed_reports += 1
            skipped("charge report", subject, error)
            return
        if (report.router_id, report.incarnation) == (self._router_id, self._incarnation):
            return
        if self.others.apply(report):
            log.info("another router is there", router=report.router_id)
            self._greet()

    def _greet(self) -> None:
        """Publishes all charges soon, because some router does not know them yet."""
        self._say_all = True
        self._news.set()


def _totals(charge: WorkerCharge) -> Totals:
    return Totals(charge.requests, charge.prefill_tokens, charge.blocks, charge.prefill_pairs)
