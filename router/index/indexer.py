"""Keeps the radix tree equal to what the workers have cached, whatever happens to their events on the way.

Applies each worker's batches of KV events to the tree in the order of their ids. A batch that is missing, or an event
that contradicts the tree, is left to healing.py. Each worker also says with its load how much it has published, so that
even a NATS server that lost everything costs seconds. Event loop only.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from baton_proto.discovery import EVENTS_ROLE, LoadReport, WorkerLoad
from baton_proto.kv_events import Stored, decode_batch
from baton_proto.worker import SnapshotChunk
from router.index.event_snapshot import snapshot_from_stream
from router.index.followed_worker import FetchSnapshot, FollowedWorker, State
from router.index.healing import Healer
from router.index.match import Match
from router.index.radix_tree import RadixTree
from runtime.discovery.directory import Change
from runtime.discovery.worker_key import WorkerKey
from runtime.end_task import end_tasks
from runtime.errors import ProtocolError, WorkerLostError
from runtime.nats.client import NatsClient
from runtime.nats.skipped import skipped
from runtime.nats.subjects import kv_events_subject, worker_of

log = structlog.get_logger()


class Indexer:
    def __init__(
        self,
        nats: NatsClient,
        fetch_snapshot: FetchSnapshot,
        stored: Callable[[WorkerKey, bytes], None] = lambda worker, block_hashes: None,
    ) -> None:
        """`stored` is told the block hashes (u64 LE) of each run that an event has added to the tree."""
        self.tree = RadixTree()
        self.malformed_events = 0
        self.refused_events = 0  # that contradict the tree: unknown parents, unknown removals
        self.batches = 0  # applied
        self._nats = nats
        self._fetch_snapshot = fetch_snapshot
        self._stored = stored
        self._workers: dict[str, FollowedWorker] = {}
        self._healer = Healer(nats, self.tree, self._workers, self._apply_ready)
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens from now on. Workers are told with `apply`, which may happen before."""
        self._nats.on_reconnect(self._healer.reconnected)
        await self._nats.subscribe(kv_events_subject(self._nats.namespace), self._receive)
        self._watch = asyncio.create_task(self._healer.watch())

    async def close(self) -> None:
        tasks = [worker.healing for worker in self._workers.values()] + [self._watch]
        await end_tasks(*(task for task in tasks if task is not None))

    def apply(self, change: Change) -> None:
        """A callback of the Directory's: takes a snapshot of what is added, forgets what is removed."""
        key = (change.record.worker_id, change.record.incarnation)
        if change.kind == "added":
            only_events = change.record.role == EVENTS_ROLE
            worker = FollowedWorker(key, self._snapshot_from_stream if only_events else self._fetch_snapshot)
            self._workers[key[0]] = worker
            self._healer.heal(worker)
        elif change.kind == "removed" and self._known(key) is not None:
            healing = self._workers.pop(key[0]).healing
            if healing is not None:
                healing.cancel()
            self.tree.remove_worker(key)

    def match(self, hashes: NDArray[np.uint64]) -> Match:
        """How many leading blocks of a prompt each worker holds. To be read before the next event."""
        return self.tree.find(hashes)

    # --- what workers say of their events -----------------------------------------------------------------------------

    def load_report(self, report: LoadReport) -> None:
        """Takes a worker's load from the metrics plane."""
        worker = self._known((report.worker_id, report.incarnation))
        if worker is not None:
            worker.expect(report.load.last_event_id)

    def observe(self, key: WorkerKey, load: WorkerLoad) -> None:
        """A worker's load, from a step message or the metrics plane."""
        worker = self._known(key)
        if worker is not None:
            worker.observe(load)

    # --- for operators ------------------------------------------------------------------------------------------------

    @property
    def gaps(self) -> int:
        """Holes in the event ids of all workers."""
        return self._healer.gaps

    @property
    def snapshots(self) -> int:
        return self._healer.snapshots

    @property
    def settled(self) -> bool:
        """The tree contains all that is known to have been published, for every worker."""
        return all(worker.settled for worker in self._workers.values())

    @property
    def workers(self) -> list[FollowedWorker]:
        return list(self._workers.values())

    def note(self, key: WorkerKey) -> str:
        """What an operator should know about a worker's events; empty when all is well."""
        worker = self._known(key)
        return worker.note if worker is not None else "not in the directory"

    def last_event_id(self, key: WorkerKey) -> int:
        """Id of the newest batch that the tree contains; 0: none."""
        worker = self._known(key)
        return worker.feed.applied if worker is not None else 0

    def batches_of(self, key: WorkerKey) -> int:
        """Batches of a worker that were applied, without those that a snapshot stood for."""
        worker = self._known(key)
        return worker.batches if worker is not None else 0

    def contained(self, key: WorkerKey) -> int | None:
        """The event up to which the tree is what the worker had; None while only a snapshot can tell.

        Raises WorkerLostError.
        """
        return self._existing(key).contained

    @contextmanager
    def following(self, key: WorkerKey, seen: Callable[[int], None]) -> Iterator[None]:
        """`seen` is called with each event id of the worker's that the tree comes to, before it goes on.

        Raises WorkerLostError.
        """
        followers = self._existing(key).followers
        followers.append(seen)
        try:
            yield
        finally:
            followers.remove(seen)

    # --- following ----------------------------------------------------------------------------------------------------

    def _receive(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        try:
            batch = decode_batch(payload)
            if batch.worker_id != worker_of(subject):
                raise ProtocolError(f"worker {worker_of(subject)}", f"its batch names {batch.worker_id!r}")
        except (msgspec.DecodeError, ProtocolError) as error:
            self.malformed_events += 1
            skipped("kv event", subject, error)
            return
        worker = self._known((batch.worker_id, batch.incarnation))
        if worker is None:
            return  # not discovered yet: the snapshot at its discovery contains it; or a dead incarnation
        if not worker.feed.offer(batch):
            return
        self._apply_ready(worker)
        if worker.feed.holed:
            self._healer.heal(worker)

    def _apply_ready(self, worker: FollowedWorker) -> None:
        """Applies the batches whose turn has come. While the worker is FILLING, none has."""
        if worker.state is State.FILLING:
            return
        for batch in worker.feed.ready():
            refused = self.refused_events
            for event in batch.events:
                try:
                    self.tree.apply(worker.key, event)
                    if isinstance(event, Stored):
                        self._stored(worker.key, event.block_hashes)
                except ProtocolError as error:
                    self.refused_events += 1
                    log.warning("kv event refused", worker=worker.key[0], event_id=batch.event_id, error=str(error))
            worker.batches += 1
            self.batches += 1
            worker.come_to(batch.event_id)
            if self.refused_events > refused:
                worker.state = State.STALE
                worker.postpone_healing()
            else:
                worker.reset_heal_wait()

    def _snapshot_from_stream(self, worker_id: str, incarnation: int) -> AsyncIterator[SnapshotChunk]:
        return snapshot_from_stream(self._nats, (worker_id, incarnation))

    def _known(self, key: WorkerKey) -> FollowedWorker | None:
        worker = self._workers.get(key[0])
        return worker if worker is not None and worker.key == key else None

    def _existing(self, key: WorkerKey) -> FollowedWorker:
        """Raises WorkerLostError."""
        worker = self._known(key)
        if worker is None:
            raise WorkerLostError(key[0], "is gone")
        return worker
