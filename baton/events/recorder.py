"""Writes what the workers of a namespace publish, and who they are, into a recording.

A worker whose first batch is not in the recording had blocks before the recording began. The worker is asked for these
blocks once; they are the base on which its batches build. Batches that the base contains already are recorded, too, and
the reader skips them.
"""

import time
from datetime import datetime

import structlog

from baton.events.event_log import EventLog, StoredBatch
from baton.events.recording import Announced, Base, Batch, Left, RecordingWriter
from baton.events.worker_snapshot import worker_snapshot
from baton_proto.discovery import WorkerRecord
from runtime.discovery.directory import Change, Directory
from runtime.discovery.worker_key import WorkerKey
from runtime.errors import WorkerLostError
from runtime.nats.client import NATS_ERRORS, NatsClient
from runtime.security.cluster_key import ClusterKey

log = structlog.get_logger()


class Recorder:
    def __init__(
        self, nats: NatsClient, writer: RecordingWriter, timeout_s: float, key: ClusterKey | None = None
    ) -> None:
        """`key`: to be shown to workers that are asked for their blocks."""
        self._key = key
        self.num_batches = 0
        self.num_events = 0
        self.without_base: set[WorkerKey] = set()  # their earlier blocks are not in the recording
        self._nats = nats
        self._writer = writer
        self._timeout_s = timeout_s
        self._log = EventLog(nats)
        self._directory = Directory(nats)
        self._directory.on_change(self._write_change)
        self._workers: set[WorkerKey] = set()
        self._begun: set[WorkerKey] = set()  # their first batch or their base is written

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    async def start(self, start: int | datetime | None) -> None:
        """`start`: where to begin, see EventLog.seek. Raises NATS_ERRORS."""
        await self._log.seek(start)  # first, so that nothing falls between a base and the batches after it
        await self._directory.start()
        if start is None:
            for record in list(self._directory.workers.values()):
                await self._begin(record)
        self._writer.flush()

    async def run(self) -> None:
        """Records until it is cancelled. Raises UnavailableError when NATS stays away."""
        async for batches in self._log.follow(self._timeout_s):
            for stored in batches:
                await self._write_batch(stored)
            self._writer.flush_if_due()

    async def catch_up(self) -> None:
        """Writes what is in the stream now and not in the recording. Raises NATS_ERRORS."""
        while batches := await self._log.read():
            for stored in batches:
                await self._write_batch(stored)

    async def close(self) -> None:
        await self._directory.close()

    def _write_change(self, change: Change) -> None:
        record = change.record
        if change.kind == "removed":
            self._writer.write(Left(time.time(), record.worker_id, record.incarnation))
            self._begun.discard((record.worker_id, record.incarnation))  # if it was only silent, its blocks are new
        else:
            self._writer.write(Announced(time.time(), record))

    async def _write_batch(self, stored: StoredBatch) -> None:
        batch = stored.batch
        key = (batch.worker_id, batch.incarnation)
        if key not in self._begun:
            await self._begin_late(key, batch.event_id)
        self._workers.add(key)
        self._writer.write(Batch(stored.time_s, *key, batch.event_id, batch.timestamp_s, batch.events))
        self.num_batches += 1
        self.num_events += len(batch.events)

    async def _begin_late(self, key: WorkerKey, event_id: int) -> None:
        """The worker was not there when the recording began."""
        record = self._directory.workers.get(key[0])
        if event_id == 1:
            self._begun.add(key)
        elif record is not None and record.incarnation == key[1]:
            await self._begin(record)
        else:
            self._begun.add(key)
            self.without_base.add(key)
            log.warning("the first events of a worker that is gone are not stored any more", worker=key[0])

    async def _begin(self, record: WorkerRecord) -> None:
        key = (record.worker_id, record.incarnation)
        self._begun.add(key)
        self._workers.add(key)
        try:
            async for chunk in worker_snapshot(self._nats, record, self._timeout_s, self._key):
                self._writer.write(Base(time.time(), *key, chunk.event_id, chunk.runs, chunk.last))
        except (WorkerLostError, *NATS_ERRORS) as error:
            self.without_base.add(key)
            log.warning("blocks from before the recording are missing", worker=key[0], error=str(error))
