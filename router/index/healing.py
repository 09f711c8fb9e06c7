"""Brings workers whose events went missing, or contradict the tree, back to State.FOLLOWING.

A hole in the event ids is filled from JetStream. When JetStream does not have the batches, and for a new worker, the
worker's block table is taken as a snapshot. Each worker heals in a task of its own, so that one worker's trouble never
stops another one's.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping

import structlog

from router.index.followed_worker import FollowedWorker, State
from router.index.radix_tree import RadixTree
from runtime.errors import ProtocolError
from runtime.kv_events.history import fetch_batches, last_batch
from runtime.nats.client import NATS_ERRORS, NatsClient

REORDER_PATIENCE_S = 0.05  # batches that were sent again may overtake each other
CHECK_S = 0.25
RETRY_S = 0.25  # after a failed attempt to heal, doubling
RETRY_MAX_S = 5.0
SNAPSHOT_TIMEOUT_S = 30.0
SNAPSHOTS_AT_ONCE = 16

log = structlog.get_logger()


class Healer:
    def __init__(
        self,
        nats: NatsClient,
        tree: RadixTree,
        workers: Mapping[str, FollowedWorker],
        apply_ready: Callable[[FollowedWorker], None],
    ) -> None:
        """`workers` by worker id, kept by the caller. `apply_ready` applies the batches whose turn has come."""
        self.gaps = 0
        self.snapshots = 0
        self._nats = nats
        self._tree = tree
        self._workers = workers
        self._apply_ready = apply_ready
        self._snapshot_slots = asyncio.Semaphore(SNAPSHOTS_AT_ONCE)
        self._nats_was_away = False

    def reconnected(self) -> None:
        """Events may have been stored while NATS could not be reached."""
        self._nats_was_away = True

    def heal(self, worker: FollowedWorker) -> None:
        """Starts to heal the worker, unless that is going on or is postponed."""
        if worker.healing is None and time.monotonic() >= worker.heal_not_before_s:
            if worker.state is State.FOLLOWING:
                worker.state = State.HOLED
            worker.healing = asyncio.create_task(self._heal_until_well(worker))

    async def watch(self) -> None:
        """Heals what no event gives a reason to heal: workers whose batches do not come. Never returns."""
        while True:
            await asyncio.sleep(CHECK_S)
            if self._nats_was_away and self._nats.connected:
                self._nats_was_away = False
                await asyncio.gather(*map(self._look_up_last_batch, self._workers), return_exceptions=True)
            for worker in list(self._workers.values()):
                if worker.healing is None and (worker.state is State.STALE or worker.feed.holed or worker.lags()):
                    self.heal(worker)
                    if worker.healing is not None:
                        worker.postpone_healing()

    async def _heal_until_well(self, worker: FollowedWorker) -> None:
        retry_s = RETRY_S
        while True:
            self._check_followed(worker)
            try:
                if worker.state is State.HOLED:
                    await asyncio.sleep(REORDER_PATIENCE_S)
                    await self._fill_hole(worker)
                if worker.state is not State.FOLLOWING:
                    await self._take_snapshot(worker)
                break
            except Exception as error:
                if worker.state is not State.FILLING:
                    worker.state = State.STALE
                if retry_s > RETRY_S:  # once is nothing: a worker that was found just now may not be connected yet
                    _report(worker, f"no snapshot: {str(error) or type(error).__name__}")
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_MAX_S)
        worker.trouble = ""
        worker.healing = None

    async def _fill_hole(self, worker: FollowedWorker) -> None:
        """Leaves the worker FOLLOWING, or STALE when JetStream does not have what is missing."""
        until = worker.feed.expected
        while worker.state is State.HOLED and worker.feed.applied < until:
            missing = worker.feed.missing
            self.gaps += 1
            worker.gaps += 1
            try:
                batches = await fetch_batches(self._nats, worker.key, missing)
            except NATS_ERRORS:
                batches = None
            self._check_followed(worker)
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
            # The missing batches may have come by themselves meanwhile.
            if batches is None and worker.feed.applied < missing.stop - 1:
                worker.state = State.STALE
        if worker.state is State.HOLED:
            worker.state = State.FOLLOWING

    async def _take_snapshot(self, worker: FollowedWorker) -> None:
        """Leaves the worker FOLLOWING. Raises whatever the worker's snapshot call raises, ProtocolError and
        TimeoutError; the worker is STALE then, or still FILLING when a part of the snapshot is in the tree."""
        started_s = time.monotonic()
        async with self._snapshot_slots, asyncio.timeout(SNAPSHOT_TIMEOUT_S):
            worker.state = State.FILLING  # before the snapshot is taken, or it might be older than what is applied
            event_id = None
            chunks = worker.fetch_snapshot(*worker.key)
            try:
                async for chunk in chunks:
                    self._check_followed(worker)
                    if chunk.incarnation != worker.key[1]:
                        raise ProtocolError(f"worker {worker.key[0]}", f"this is incarnation {chunk.incarnation} of it")
                    if event_id is None:
                        self._tree.clear(worker.key)
                    event_id = chunk.event_id
                    for run in chunk.runs:
                        self._tree.apply(worker.key, run)
                    if chunk.last:
                        break
                    await asyncio.sleep(0)  # others' turn
                else:
                    raise ProtocolError(f"worker {worker.key[0]}", "its snapshot ended early")
            finally:
                if event_id is None:
                    worker.state = State.STALE  # what the tree had is better than nothing
                if isinstance(chunks, AsyncGenerator):
                    await chunks.aclose()
        self._check_followed(worker)
        self.snapshots += 1
        worker.state = State.FOLLOWING
        worker.feed.rebase(event_id)
        worker.come_to(event_id)
        blocks, seconds = self._tree.num_blocks_of(worker.key), round(time.monotonic() - started_s, 3)
        log.info("snapshot applied", worker=worker.key[0], event_id=event_id, blocks=blocks, seconds=seconds)
        self._apply_ready(worker)

    def _check_followed(self, worker: FollowedWorker) -> None:
        """Ends the healing of a worker that has left, or the tree would get its blocks again.

        Because `asyncio.wait_for` of Python 3.11 swallows a cancellation when the result comes at the same moment, the
        worker's leaving alone does not end it. Raises asyncio.CancelledError.
        """
        if self._workers.get(worker.key[0]) is not worker:
            raise asyncio.CancelledError

    async def _look_up_last_batch(self, worker_id: str) -> None:
        """Asks JetStream for what was stored before the reconnect. When this fails, the worker's load tells later."""
        batch = await last_batch(self._nats, worker_id)
        worker = self._workers.get(worker_id)
        if batch is not None and worker is not None and worker.key == (batch.worker_id, batch.incarnation):
            worker.expect(batch.event_id)


def _report(worker: FollowedWorker, trouble: str) -> None:
    if trouble != worker.trouble:
        log.warning("worker's events", worker=worker.key[0], incarnation=worker.key[1], trouble=trouble)
    worker.trouble = trouble
