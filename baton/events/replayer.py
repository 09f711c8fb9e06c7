"""Publishes a recording to a NATS server, whose routers index it as if its workers lived.

Every recorded incarnation of a worker becomes an EventSource with the same worker id and a new incarnation. Its batches
are published in the order of their ids, and numbered anew. The time between them is the recorded time divided by the
speed.
"""

import asyncio
from collections.abc import Iterable

import structlog

from baton.events.event_source import EventSource
from baton.events.recording import Announced, Base, Batch, Frame, Left, Recording
from baton_proto.kv_events import MAJOR, KvEventBatch
from runtime.discovery.directory import Directory
from runtime.discovery.worker_key import WorkerKey
from runtime.errors import ConfigError
from runtime.kv_events.stored_feed import StoredFeed
from runtime.nats.client import NatsClient

log = structlog.get_logger()


class Replayer:
    """`speed` None: as fast as JetStream stores the events. `prefix` is put before every worker id."""

    def __init__(
        self, nats: NatsClient, recording: Recording, speed: float | None, prefix: str, timeout_s: float
    ) -> None:
        self.num_batches = 0
        self.num_events = 0
        self.workers: dict[WorkerKey, EventSource] = {}  # as recorded -> as replayed
        self._nats = nats
        self._recording = recording
        self._pace = _Pace(speed) if speed is not None else None
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._feeds: dict[WorkerKey, StoredFeed] = {}
        self._models: dict[str, tuple[str, int]] = {}  # model and block size by worker id

    async def run(self) -> None:
        """Returns when all events are stored; the workers stay until `close`. Raises ConfigError when a live worker
        has the name of a recorded one, UnavailableError when NATS does not take the events."""
        taken = await self._live_workers()
        for frame in self._recording.frames():
            await self._replay(frame, taken)
        for key, feed in self._feeds.items():
            self._publish(key, feed.end())
            if feed.num_missing:
                log.warning("batches of a worker are not in the recording", worker=key[0], missing=feed.num_missing)
        for source in self.workers.values():
            await source.drain(self._timeout_s, limit=0)

    async def close(self) -> None:
        """The replayed workers leave."""
        for source in self.workers.values():
            await source.close()
        self.workers.clear()

    async def _replay(self, frame: Frame, taken: frozenset[str]) -> None:
        match frame:
            case Announced(record=record):
                self._models[record.worker_id] = (record.model, record.block_size)
                await self._source((record.worker_id, record.incarnation), taken)
            case Left(worker_id=worker_id, incarnation=incarnation):
                await self._end((worker_id, incarnation))
            case Base():
                await self._replay_base(frame, taken)
            case Batch():
                await self._replay_batch(frame, taken)
            case _:
                pass

    async def _replay_base(self, base: Base, taken: frozenset[str]) -> None:
        key = (base.worker_id, base.incarnation)
        source = await self._source(key, taken)
        source.publish([*base.runs])
        if base.last:
            self._feeds[key].rebase(base.event_id)
        await source.drain(self._timeout_s)

    async def _replay_batch(self, frame: Batch, taken: frozenset[str]) -> None:
        key = (frame.worker_id, frame.incarnation)
        if self._pace is not None:
            await self._pace.wait(frame.time_s)
        source = await self._source(key, taken)
        batch = KvEventBatch(MAJOR, *key, frame.event_id, frame.timestamp_s, frame.events)
        self._publish(key, self._feeds[key].offer(batch))
        await source.drain(self._timeout_s)

    def _publish(self, key: WorkerKey, batches: Iterable[KvEventBatch]) -> None:
        for batch in batches:
            self.workers[key].publish(batch.events)
            self.num_batches += 1
            self.num_events += len(batch.events)

    async def _source(self, key: WorkerKey, taken: frozenset[str]) -> EventSource:
        source = self.workers.get(key)
        if source is not None:
            return source
        name = self._prefix + key[0]
        if name in taken:
            raise ConfigError("--prefix", f"a worker {name!r} lives there; give the replayed ones other names")
        for other in [other for other in self.workers if other[0] == key[0]]:
            await self._end(other)  # this one replaces it
        model, block_size = self._models.get(key[0], ("", 0))
        source = self.workers[key] = EventSource(self._nats, name, model, block_size)
        self._feeds[key] = StoredFeed()
        await source.start(self._timeout_s)
        return source

    async def _end(self, key: WorkerKey) -> None:
        if key in self.workers:
            self._publish(key, self._feeds.pop(key).end())
            source = self.workers.pop(key)
            await source.drain(self._timeout_s, limit=0)
            await source.close()

    async def _live_workers(self) -> frozenset[str]:
        directory = Directory(self._nats)
        await directory.start()
        await directory.close()
        return frozenset(directory.workers)


class _Pace:
    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._origin: tuple[float, float] | None = None  # recorded time, loop time

    async def wait(self, recorded_s: float) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._origin is None:
            self._origin = (recorded_s, now_s)
        due_s = self._origin[1] + (recorded_s - self._origin[0]) / self._speed
        if due_s > now_s:
            await asyncio.sleep(due_s - now_s)
