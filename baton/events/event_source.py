"""A worker that is known by its KV events alone: that of a replayed recording.

It is announced with EVENTS_ROLE: routers index its blocks and send it nothing.
"""

import asyncio
import os

from baton_proto.discovery import EVENTS_ROLE, MAJOR, LoadReport, WorkerLoad, WorkerRecord
from baton_proto.kv_events import KvEvent
from runtime.discovery.directory import Announcer
from runtime.discovery.load_board import publish_load
from runtime.discovery.worker_key import new_incarnation
from runtime.end_task import end_tasks
from runtime.errors import UnavailableError
from runtime.kv_events.publisher import EventPublisher
from runtime.nats.client import NatsClient

LOAD_INTERVAL_S = 1.0
UNACKNOWLEDGED_LIMIT = 2000  # batches that JetStream has not stored yet; beyond that `drain` waits


class EventSource:
    def __init__(self, nats: NatsClient, worker_id: str, model: str, block_size: int) -> None:
        self.worker_id = worker_id
        self.incarnation = new_incarnation()
        self._nats = nats
        self._publisher = EventPublisher(nats, worker_id, self.incarnation)
        record = WorkerRecord(
            version=MAJOR,
            worker_id=worker_id,
            incarnation=self.incarnation,
            role=EVENTS_ROLE,
            state="ready",
            rpc_address="",
            transfer=None,
            model=model,
            model_hash="",
            block_size=block_size,
            num_blocks=0,
            max_model_len=0,
            pid=os.getpid(),
        )
        self._announcer = Announcer(nats, record)
        self._reports: asyncio.Task[None] | None = None

    @property
    def last_event_id(self) -> int:
        return self._publisher.last_event_id

    async def start(self, timeout_s: float) -> None:
        """Raises UnavailableError when NATS does not take the announcement in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._announcer.start()
        except TimeoutError as error:
            raise UnavailableError(f"NATS did not take an announcement within {timeout_s:g} s") from error
        self._reports = asyncio.create_task(self._report_load())

    def publish(self, events: list[KvEvent]) -> None:
        self._publisher.publish(events)

    async def drain(self, timeout_s: float, limit: int = UNACKNOWLEDGED_LIMIT) -> None:
        """Waits while JetStream lags behind by more than `limit` batches. Raises UnavailableError."""
        if self._publisher.unacknowledged > limit and not await self._publisher.flush(timeout_s):
            raise UnavailableError(f"NATS did not store the events within {timeout_s:g} s")

    async def close(self) -> None:
        """The worker leaves, and its blocks disappear from the routers."""
        await end_tasks(self._reports)
        await self._publisher.close()
        await self._announcer.withdraw()

    async def _report_load(self) -> None:
        """The reports carry the last event id, so that routers notice what they have missed."""
        while True:
            load = WorkerLoad(last_event_id=self.last_event_id)
            report = LoadReport(version=MAJOR, worker_id=self.worker_id, incarnation=self.incarnation, load=load)
            await publish_load(self._nats, report)
            await asyncio.sleep(LOAD_INTERVAL_S)
