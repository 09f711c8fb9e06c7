"""How far each worker's events have come, and which are missing: `baton events lag`.

Discovery tells which workers live, the load reports what was published, and the stream what is stored.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime

from baton.events.event_log import EventLog, StoredBatch
from baton.events.id_track import IdTrack
from baton_proto.discovery import WorkerLoad, WorkerRecord
from baton_proto.kv_events import KvEventBatch
from runtime.discovery.directory import Directory
from runtime.discovery.load_board import LoadBoard
from runtime.kv_events.history import last_batch
from runtime.nats.client import NatsClient
from runtime.nats.subjects import kv_events_stream, kv_events_subject, worker_of

REPORTS_WAIT_S = 1.5  # every worker reports its load once a second
GONE = "gone"  # the state of a worker that is in the stream and not in discovery


@dataclass(frozen=True, slots=True)
class WorkerLag:
    worker_id: str
    role: str
    state: str
    incarnation: int
    published_id: int | None  # None: the worker has not said
    stored_id: int
    missing: list[range]  # ids between stored ones, within the window
    age_s: float | None  # of the last stored batch; None: there is none
    events_per_s: float  # over the window
    blocks_cached: int | None
    blocks_total: int | None

    @property
    def behind(self) -> int | None:
        """Batches that were published and are not stored."""
        return None if self.published_id is None else max(0, self.published_id - self.stored_id)


class LagMonitor:
    """`window_s`: the span of time before now in which rates are counted and gaps are looked for."""

    def __init__(self, nats: NatsClient, window_s: float) -> None:
        self._nats = nats
        self._window_s = window_s
        self._directory = Directory(nats)
        self._loads = LoadBoard(nats)
        self._log = EventLog(nats)
        self._seen: dict[str, _Seen] = {}
        self._reported = asyncio.Event()

    async def start(self, timeout_s: float) -> None:
        """Returns when every live worker has reported its load, or had the time to. Raises NATS_ERRORS."""
        self._loads.on_report(lambda report: self._reported.set())
        await self._loads.start()
        await self._directory.start()
        await self._log.seek(datetime.fromtimestamp(time.time() - self._window_s, UTC))
        subjects = await self._nats.stored_subjects(
            kv_events_stream(self._nats.namespace), kv_events_subject(self._nats.namespace)
        )
        for worker_id in map(worker_of, subjects):
            batch = await last_batch(self._nats, worker_id)
            if batch is not None:
                self._seen[worker_id] = _Seen(batch)
        try:
            async with asyncio.timeout(min(timeout_s, REPORTS_WAIT_S)):
                while self._directory.workers.keys() - self._loads.reports.keys():
                    self._reported.clear()
                    await self._reported.wait()
        except TimeoutError:
            pass  # the report shows the workers that have said nothing

    async def update(self) -> None:
        """Reads what is new in the stream. Raises NATS_ERRORS."""
        while batches := await self._log.read():
            for stored in batches:
                batch = stored.batch
                seen = self._seen.get(batch.worker_id)
                if seen is None or batch.incarnation > seen.incarnation:
                    seen = self._seen[batch.worker_id] = _Seen(batch)
                if batch.incarnation == seen.incarnation:
                    seen.observe(stored)

    def report(self) -> list[WorkerLag]:
        """Returns one row per worker, in the order of their ids."""
        ids = sorted(self._directory.workers.keys() | self._seen.keys())
        return [self._worker(worker_id) for worker_id in ids]

    async def close(self) -> None:
        await self._directory.close()

    def _worker(self, worker_id: str) -> WorkerLag:
        record = self._directory.workers.get(worker_id)
        seen = self._seen.get(worker_id)
        if seen is not None and record is not None and seen.incarnation != record.incarnation:
            seen = None  # the stored batches are of an earlier incarnation
        load = self._load(record)
        now_s = time.time()
        return WorkerLag(
            worker_id=worker_id,
            role=record.role if record else "",
            state=record.state if record else GONE,
            incarnation=record.incarnation if record else seen.incarnation if seen else 0,
            published_id=load.last_event_id if load else None,
            stored_id=seen.stored_id if seen else 0,
            missing=seen.ids.missing if seen else [],
            age_s=max(0.0, now_s - seen.timestamp_s) if seen else None,
            events_per_s=seen.events_since(now_s - self._window_s) / self._window_s if seen else 0.0,
            blocks_cached=load.blocks_cached if load else None,
            blocks_total=load.blocks_total if load else None,
        )

    def _load(self, record: WorkerRecord | None) -> WorkerLoad | None:
        report = self._loads.reports.get(record.worker_id) if record else None
        return report.load if record and report and report.incarnation == record.incarnation else None


class _Seen:
    """What the stream holds of one incarnation."""

    def __init__(self, batch: KvEventBatch) -> None:
        self.incarnation = batch.incarnation
        self.stored_id = batch.event_id
        self.timestamp_s = batch.timestamp_s
        self.ids = IdTrack()
        self._counts: deque[list[float]] = deque()  # [second, events], oldest first

    def observe(self, stored: StoredBatch) -> None:
        batch = stored.batch
        if not self.ids.observe(batch.event_id):
            return
        if batch.event_id >= self.stored_id:
            self.stored_id, self.timestamp_s = batch.event_id, batch.timestamp_s
        second = float(int(stored.time_s))
        if self._counts and self._counts[-1][0] == second:
            self._counts[-1][1] += len(batch.events)
        else:
            self._counts.append([second, float(len(batch.events))])

    def events_since(self, time_s: float) -> float:
        while self._counts and self._counts[0][0] < int(time_s):
            self._counts.popleft()
        return sum(events for _, events in self._counts)
