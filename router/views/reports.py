"""Tells the planner once a second what waits at this router and what the router has counted."""

import asyncio
import contextlib
import time

from baton_proto.routers.router_report import MAJOR, RouterQueue, RouterReport, encode_router_report
from router.counters.metrics import RouterMetrics
from router.requests.admission import AdmissionQueue
from runtime.discovery.worker_key import new_incarnation
from runtime.end_task import end_tasks
from runtime.nats.client import NATS_ERRORS, NatsClient
from runtime.nats.subjects import router_subject

INTERVAL_S = 1.0


class Reporter:
    """Publishes between start() and close(); the last report says that the router is leaving."""

    def __init__(
        self, nats: NatsClient, router_id: str, queue: AdmissionQueue, metrics: RouterMetrics, metrics_address: str
    ) -> None:
        self._nats = nats
        self._router_id = router_id
        self._incarnation = new_incarnation()
        self._queue = queue
        self._metrics = metrics
        self._metrics_address = metrics_address
        self._began_s = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="reports to the planner")

    async def close(self) -> None:
        if self._task is None:
            return
        await end_tasks(self._task)
        await self._publish(leaving=True)
        with contextlib.suppress(*NATS_ERRORS):
            await self._nats.flush()

    async def _run(self) -> None:
        while True:
            await self._publish()
            await asyncio.sleep(INTERVAL_S)

    async def _publish(self, leaving: bool = False) -> None:
        view, uptime_s = self._queue.view(), time.monotonic() - self._began_s
        queue = RouterQueue(view.waiting, self._queue.waiting_tokens(), view.oldest_age_s)
        totals = self._metrics.totals
        report = RouterReport(
            MAJOR, self._router_id, self._incarnation, uptime_s, queue, totals, leaving, self._metrics_address
        )
        await self._nats.publish(router_subject(self._nats.namespace, self._router_id), encode_router_report(report))
