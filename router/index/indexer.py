"""Keeps the radix tree equal to what the workers have cached, whatever happens to their events on the way.

Listens to the event plane, applies each worker's batches in order, and heals: a hole in the numbers is filled from
JetStream, or else a snapshot of the worker's block table is taken. A worker that says (with its load) that it
published more than we saw is healed too, so that even a NATS server that lost everything costs seconds. One worker's
trouble never stops another one's. Workers come and go with the directory. Event loop only.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from baton_proto.discovery import EVENTS_ROLE, LoadReport, WorkerLoad
from baton_proto.kv_events import Stored, decode_batch
from baton_proto.worker import SnapshotChunk
from router.index.event_snapshot import apply_event, snapshot_from_stream
from router.index.match import Match
from router.index.prefix_hits import PrefixHits
from router.index.radix_tree import RadixTree
from runtime.discovery.directory import Change
from runtime.discovery.worker_key import WorkerKey
from runtime.end_task import end_tasks
from runtime.errors import ProtocolError, WorkerLostError
from runtime.kv_events.feed import EventFeed
from runtime.kv_events.history import fetch_batches, last_batch
from runtime.nats.client import NATS_ERRORS, NatsClient
from runtime.nats.subjects import kv_events_subject, worker_of

REORDER_PATIENCE_S = 0.05  # batches that were sent again may overtake each other
LAG_S = 1.0  # how long the tree may lag behind what a worker says it published
CHECK_S = 0.25
RETRY_S = 0.25  # after a failed attempt to heal, doubling
RETRY_MAX_S = 5.0
SNAPSHOT_TIMEOUT_S = 30.0
SNAPSHOTS_AT_ONCE = 16
SILENT_S = 5.0  # a worker may cache blocks for this long without publishing anything

SILENT_NOTE = "caches blocks but publishes no events: requests reach it by load alone"

FetchSnapshot = Callable[[str, int], AsyncIterator[SnapshotChunk]]
"""(worker id, incarnation) -> the worker's block table. May raise anything; it is called again later."""

log = structlog.get_logger()


class EventState(NamedTuple):
    """How far one worker's events have come."""

    worker_id: str
    batches: int  # applied, without those that a snapshot stood for
    lag: int  # batches that it has published and that the tree does not contain
    gaps: int  # holes in its event numbers
    silent: bool  # it caches blocks and publishes nothing


class _Worker:
    """What the indexer remembers of one incarnation of a worker."""

    def __init__(self, key: WorkerKey, fetch_snapshot: FetchSnapshot) -> None:
        self.key = key
        self.fetch_snapshot = fetch_snapshot
        self.feed = EventFeed()
        self.needs_snapshot = True
        self.healing: asyncio.Task[None] | None = None
        self.heal_not_before_s = 0.0  # monotonic
        self.heal_wait_s = LAG_S
        self.lag: tuple[int, float] | None = None  # id that should have arrived, since when (monotonic)
        self.silent_since_s: float | None = None  # monotonic
        self.silent = False
        self.trouble = ""
        self.batches = 0  # applied, as they came
        self.gaps = 0
        self.followers: list[Callable[[int], None]] = []  # told each event id that the tree has come to


class Indexer:
    def __init__(self, nats: NatsClient, fetch_snapshot: FetchSnapshot) -> None:
        self.tree = RadixTree()
        self.malformed_events = 0
        self.refused_events = 0  # that contradict the tree: unknown parents, unknown removals
        self.duplicates = 0
        self.gaps = 0
        self.snapshots = 0
        self.batches = 0  # applied
        self.hits = PrefixHits()
        self._matched: Match | None = None
        self.stored: Callable[[WorkerKey, bytes], None] = lambda worker, block_hashes: None  # called with what came
        self._nats = nats
        self._fetch_snapshot = fetch_snapshot
        self._workers: dict[str, _Worker] = {}
        self._snapshot_slots = asyncio.Semaphore(SNAPSHOTS_AT_ONCE)
        self._nats_was_away = False
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens from now on. Workers are told with `apply`, which may happen before."""
        self._nats.on_reconnect(self._reconnected)
        await self._nats.subscribe(kv_events_subject(self._nats.namespace), self._receive)
        self._watch = asyncio.create_task(self._watch_lags())

    async def close(self) -> None:
        tasks = [worker.healing for worker in self._workers.values()] + [self._watch]
        await end_tasks(*(task for task in tasks if task is not None))

    def apply(self, change: Change) -> None:
        """A callback of the Directory's: takes a snapshot of what is added, forgets what is removed."""
        key = (change.record.worker_id, change.record.incarnation)
        if change.kind == "added":
            only_events = change.record.role == EVENTS_ROLE
            worker = _Worker(key, self._snapshot_from_stream if only_events else self._fetch_snapshot)
            self._workers[key[0]] = worker
            self._heal(worker)
        elif change.kind == "removed" and self._tracked(key) is not None:
            healing = self._workers.pop(key[0]).healing
            if healing is not None:
                healing.cancel()
            self.tree.remove_worker(key)

    # --- for placement and status -------------------------------------------------------------------------------------

    def match(self, hashes: NDArray[np.uint64]) -> Match:
        """How many leading blocks of a prompt each worker holds. To be read before the next event."""
        self._matched = self.tree.find(hashes)
        return self._matched

    def recent_hits(self) -> float:
        """Of the prefix that was matched last, as PrefixHits.recent."""
        return self.hits.recent(self._matched.last_block) if self._matched is not None else 0.0

    def count_hit(self) -> None:
        """The prompt that was matched last has been given workers."""
        if self._matched is not None:
            self.hits.count(self._matched.last_block)

    def last_event_id(self, worker: WorkerKey) -> int:
        """Of the newest batch that the tree contains."""
        known = self._tracked(worker)
        return known.feed.applied if known is not None else 0

    def contained(self, worker: WorkerKey) -> int | None:
        """The event up to which the tree is what the worker had; None: it is just being filled from a snapshot.

        Raises WorkerLostError.
        """
        known = self._tracked(worker)
        if known is None:
            raise WorkerLostError(worker[0], "is gone")
        return None if known.feed.suspended or known.needs_snapshot else known.feed.applied

    def batches_of(self, worker: WorkerKey) -> int:
        """That were applied, without those that a snapshot stood for."""
        known = self._tracked(worker)
        return known.batches if known is not None else 0

    @contextmanager
    def following(self, worker: WorkerKey, seen: Callable[[int], None]) -> Iterator[None]:
        """`seen` is called with each event id of the worker's that the tree comes to, before it goes on."""
        known = self._tracked(worker)
        if known is None:
            raise WorkerLostError(worker[0], "is gone")
        known.followers.append(seen)
        try:
            yield
        finally:
            known.followers.remove(seen)

    def note(self, worker: WorkerKey) -> str:
        """What an operator should know about a worker's events; empty when all is well."""
        known = self._tracked(worker)
        if known is None:
            return "not in the directory"
        if known.silent:
            return SILENT_NOTE
        if known.trouble:
            return known.trouble
        if known.needs_snapshot:
            return "a snapshot is being taken"
        if known.healing is not None:
            return f"behind: event {known.feed.applied} of {known.feed.expected}"
        return ""

    def event_states(self) -> list[EventState]:
        return [
            EventState(worker_id, one.batches, max(0, one.feed.expected - one.feed.applied), one.gaps, one.silent)
            for worker_id, one in self._workers.items()
        ]

    @property
    def settled(self) -> bool:
        """The tree contains all that is known to have been published, for every worker."""
        return all(not worker.needs_snapshot and not worker.feed.behind for worker in self._workers.values())

    def expect(self, worker_id: str, incarnation: int, event_id: int) -> None:
        """The worker says that it has published batches up to `event_id`."""
        worker = self._tracked((worker_id, incarnation))
        if worker is not None and event_id > worker.feed.expected:
            worker.feed.expected = event_id

    def load_report(self, report: LoadReport) -> None:
        """From the metrics plane."""
        self.expect(report.worker_id, report.incarnation, report.load.last_event_id)

    def observe(self, worker: WorkerKey, load: WorkerLoad) -> None:
        """A worker's load, from a step message or the metrics plane."""
        self.expect(*worker, load.last_event_id)
        known = self._tracked(worker)
        if known is None:
            return
        if load.last_event_id or not load.blocks_cached:
            known.silent_since_s = None
            known.silent = False
        elif known.silent_since_s is None:
            known.silent_since_s = time.monotonic()
        elif not known.silent and time.monotonic() - known.silent_since_s > SILENT_S:
            known.silent = True
            log.warning("worker publishes no events", worker=worker[0], incarnation=worker[1], note=SILENT_NOTE)

    # --- events -------------------------------------------------------------------------------------------------------

    def _receive(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        try:
            batch = decode_batch(payload)
            if batch.worker_id != worker_of(subject):
                raise ProtocolError(f"worker {worker_of(subject)}", f"its batch names {batch.worker_id!r}")
        except (msgspec.DecodeError, ProtocolError) as error:
            self.malformed_events += 1
            log.warning("malformed kv event skipped", subject=subject, error=str(error))
            return
        worker = self._tracked((batch.worker_id, batch.incarnation))
        if worker is None:
            return  # not discovered yet: the snapshot at its discovery contains it; or a dead incarnation
        if not worker.feed.offer(batch):
            self.duplicates += 1
            return
        self._apply_ready(worker)
        if worker.feed.holed:
            self._heal(worker)

    def _apply_ready(self, worker: _Worker) -> None:
        for batch in worker.feed.ready():
            refused = self.refused_events
            for event in batch.events:
                try:
                    apply_event(self.tree, worker.key, event)
                    if isinstance(event, Stored):
                        self.stored(worker.key, event.block_hashes)
                except ProtocolError as error:
                    self.refused_events += 1
                    log.warning("kv event refused", worker=worker.key[0], event_id=batch.event_id, error=str(error))
            worker.batches += 1
            self.batches += 1
            for seen in worker.followers:
                seen(batch.event_id)
            if self.refused_events > refused:
                worker.needs_snapshot = True
                self._postpone_healing(worker)
            else:
                worker.heal_wait_s = LAG_S

    def _tracked(self, key: WorkerKey) -> _Worker | None:
        worker = self._workers.get(key[0])
        return worker if worker is not None and worker.key == key else None

    # --- healing ------------------------------------------------------------------------------------------------------

    def _heal(self, worker: _Worker) -> None:
        """Unless that is going on, or has just been done for the same reason."""
        if worker.healing is None and time.monotonic() >= worker.heal_not_before_s:
            worker.healing = asyncio.create_task(self._heal_until_well(worker))

    def _postpone_healing(self, worker: _Worker) -> None:
        """A worker whose events keep contradicting themselves, or do not come at all, must not keep us busy."""
        worker.heal_not_before_s = time.monotonic() + worker.heal_wait_s
        worker.heal_wait_s = min(2 * worker.heal_wait_s, RETRY_MAX_S)

    async def _heal_until_well(self, worker: _Worker) -> None:
        retry_s = RETRY_S
        while True:
            try:
                if not worker.needs_snapshot:
                    await asyncio.sleep(REORDER_PATIENCE_S)
                    await self._fill_hole(worker)
                if worker.needs_snapshot:
                    await self._take_snapshot(worker)
            except Exception as error:
                worker.needs_snapshot = True
                if retry_s > RETRY_S:  # once is nothing: a worker that was found just now may not be connected yet
                    self._trouble(worker, f"no snapshot: {str(error) or type(error).__name__}")
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_MAX_S)
            else:
                worker.trouble = ""
                worker.healing = None
                return

    async def _fill_hole(self, worker: _Worker) -> None:
        """From JetStream; asks for a snapshot when that does not have what is missing."""
        until = worker.feed.expected
        while worker.feed.applied < until and not worker.needs_snapshot:
            missing = worker.feed.missing
            self.gaps += 1
            worker.gaps += 1
            try:
                batches = await fetch_batches(self._nats, worker.key, missing)
            except NATS_ERRORS:
                batches = None
            log.info(
                "kv events missing",
                worker=worker.key[0],
                first=missing.start,
                last=missing.stop - 1,
                stored=batches is not None,
            )
            for batch in batches or ():
                worker.feed.offer(batch)
            self._apply_ready(worker)
            # What was missing may have come by itself meanwhile.
            worker.needs_snapshot |= batches is None and worker.feed.applied < missing.stop - 1

    async def _take_snapshot(self, worker: _Worker) -> None:
        """Raises whatever the worker's snapshot call raises, ProtocolError and TimeoutError."""
        started_s = time.monotonic()
        async with self._snapshot_slots, asyncio.timeout(SNAPSHOT_TIMEOUT_S):
            worker.feed.suspend()  # from before the snapshot is taken, or it might be older than what we apply
            event_id = None
            chunks = worker.fetch_snapshot(*worker.key)
            try:
                async for chunk in chunks:
                    if chunk.incarnation != worker.key[1]:
                        raise ProtocolError(f"worker {worker.key[0]}", f"this is incarnation {chunk.incarnation} of it")
                    if event_id is None:
                        self.tree.clear(worker.key)
                    event_id = chunk.event_id
                    for run in chunk.runs:
                        self.tree.apply_stored(worker.key, run.parent, run.block_hashes, run.sequence_hashes)
                    if chunk.last:
                        break
                    await asyncio.sleep(0)  # others' turn
                else:
                    raise ProtocolError(f"worker {worker.key[0]}", "its snapshot ended early")
            finally:
                if event_id is None:
                    worker.feed.resume()  # what we had is better than nothing
                if isinstance(chunks, AsyncGenerator):
                    await chunks.aclose()
        self.snapshots += 1
        worker.needs_snapshot = False
        worker.feed.rebase(event_id)
        for seen in worker.followers:
            seen(event_id)
        blocks, seconds = self.tree.num_blocks_of(worker.key), round(time.monotonic() - started_s, 3)
        log.info("snapshot applied", worker=worker.key[0], event_id=event_id, blocks=blocks, seconds=seconds)
        self._apply_ready(worker)

    def _snapshot_from_stream(self, worker_id: str, incarnation: int) -> AsyncIterator[SnapshotChunk]:
        return snapshot_from_stream(self._nats, (worker_id, incarnation))

    async def _watch_lags(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            if self._nats_was_away and self._nats.connected:
                self._nats_was_away = False
                await asyncio.gather(*map(self._look_up_last_batch, self._workers), return_exceptions=True)
            for worker in list(self._workers.values()):
                if worker.healing is None and (worker.needs_snapshot or worker.feed.holed or self._lags(worker)):
                    self._heal(worker)
                    if worker.healing is not None:
                        worker.lag = None
                        self._postpone_healing(worker)

    def _lags(self, worker: _Worker) -> bool:
        """Since a while it is known that a batch was published, and it is not here yet."""
        if not worker.feed.behind or (worker.lag is not None and worker.feed.applied >= worker.lag[0]):
            worker.lag = None
        if worker.feed.behind and worker.lag is None:
            worker.lag = (worker.feed.expected, time.monotonic())
        return worker.lag is not None and time.monotonic() - worker.lag[1] > LAG_S

    def _reconnected(self) -> None:
        self._nats_was_away = True

    async def _look_up_last_batch(self, worker_id: str) -> None:
        """What was stored before we were connected again. When this fails, the worker's load tells us later."""
        batch = await last_batch(self._nats, worker_id)
        if batch is not None:
            self.expect(batch.worker_id, batch.incarnation, batch.event_id)

    def _trouble(self, worker: _Worker, trouble: str) -> None:
        if trouble != worker.trouble:
            log.warning("worker's events", worker=worker.key[0], incarnation=worker.key[1], trouble=trouble)
        worker.trouble = trouble
