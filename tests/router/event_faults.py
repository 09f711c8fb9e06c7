"""Workers with real block managers whose events go through a faulty wire, and a router that is to stay right.

Faults happen on both halves of the way: what the stream never stores can only be made good by a snapshot, what the
stream has and the router did not hear is fetched from there.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence as Run

import numpy as np
from nats.aio.subscription import Subscription
from nats.js.api import PubAck

from baton_proto.discovery import MAJOR as RECORD_MAJOR, WorkerLoad, WorkerRecord
from baton_proto.kv_events import MAJOR, KvEventBatch, Stored, encode_batch
from baton_proto.sampling import SamplingParams
from baton_proto.worker import SnapshotChunk
from engine.blocks.block_manager import BlockManager
from engine.sequences.sequence import Sequence
from router.index.indexer import Indexer
from runtime.discovery.directory import Change
from runtime.discovery.worker_key import WorkerKey
from runtime.kv_events.publisher import EventPublisher
from runtime.nats.client import NatsClient
from runtime.nats.subjects import kv_events_subject

BLOCK_SIZE = 4
SAMPLING = SamplingParams(max_tokens=1)
Handler = Callable[[str, bytes, dict[str, str]], None]


class Faults:
    """Draws what goes wrong, and counts it. Nothing does while `on` is False."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.on = True
        self.counts: Counter[str] = Counter()

    def strikes(self, what: str, probability: float) -> bool:
        if not self.on or self.rng.random() >= probability:
            return False
        self.counts[what] += 1
        return True


class FaultySender:
    """The worker's connection: loses, doubles, cuts short and swaps what it publishes, before the stream has it."""

    def __init__(self, nats: NatsClient, faults: Faults) -> None:
        self._nats = nats
        self._faults = faults
        self._held: tuple[str, bytes] | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._nats, name)

    async def publish_pipelined(self, subject: str, payload: bytes) -> "asyncio.Future[PubAck]":
        faults = self._faults
        if faults.strikes("lost before the stream", 0.01):
            return _acknowledged()
        if faults.strikes("malformed", 0.01):
            await self._nats.publish_pipelined(subject, faults.rng.randbytes(faults.rng.randint(0, 40)))
        if faults.strikes("cut short", 0.005):
            payload = payload[: faults.rng.randrange(len(payload))]
        if faults.strikes("stored twice", 0.02):
            await self._nats.publish_pipelined(subject, payload)
        if self._held is None and faults.strikes("stored in another order", 0.02):
            self._held = (subject, payload)
            return _acknowledged()
        future = await self._nats.publish_pipelined(subject, payload)
        if self._held is not None:
            held, self._held = self._held, None
            await self._nats.publish_pipelined(*held)
        return future


class FaultyReceiver:
    """The router's connection: loses, doubles and swaps what the stream has already stored."""

    def __init__(self, nats: NatsClient, faults: Faults) -> None:
        self._nats = nats
        self._faults = faults
        self._held: tuple[str, bytes, dict[str, str]] | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._nats, name)

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        def receive(subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
            message = (subject, payload, dict(headers))
            if self._faults.strikes("lost behind the stream", 0.02):
                return
            if self._held is None and self._faults.strikes("received in another order", 0.02):
                self._held = message
                return
            for _ in range(1 + self._faults.strikes("received twice", 0.02)):
                handler(*message)
            if self._held is not None:
                held, self._held = self._held, None
                handler(*held)

        return await self._nats.subscribe(subject, receive)


class Slots:
    """A lower tier of which only the books are kept."""

    num_slots = 16
    num_window_slots = 0
    spare = 0

    def store(self, blocks: Run[int], slots: Run[int]) -> None:
        pass

    def load(self, slots: Run[int], blocks: Run[int]) -> None:
        pass

    def load_s(self, num_blocks: int) -> float:
        return 0.0

    def close(self) -> None:
        pass


class FaultyWorker:
    """Runs prompts from a small family of prefixes in a small pool above a small lower tier, so that blocks are shared,
    moved and evicted all the time. Its block table is the truth."""

    def __init__(self, nats: NatsClient, faults: Faults, worker_id: str, incarnation: int) -> None:
        self.key: WorkerKey = (worker_id, incarnation)
        self.manager = BlockManager(32, BLOCK_SIZE, Slots())
        self.publisher = EventPublisher(FaultySender(nats, faults), worker_id, incarnation)  # type: ignore[arg-type]
        self.snapshots = 0
        self._nats = nats
        self._faults = faults
        self._running: list[Sequence] = []

    def work(self, rng: random.Random) -> None:
        """One engine step: a prompt comes, one grows, or one ends."""
        action = rng.random()
        if action < 0.5 or not self._running:
            tokens = [rng.randint(1, 3) for _ in range(rng.randint(1, 5)) for _ in range(BLOCK_SIZE)]
            sequence = Sequence("r", tokens + [9] * rng.randint(1, 9), 1, SAMPLING)
            if self.manager.allocate(sequence):
                self._running.append(sequence)
                self._compute(sequence)
        elif action < 0.7:
            sequence = rng.choice(self._running)
            sequence.token_ids.extend(rng.randint(1, 3) for _ in range(rng.randint(1, 6)))
            if self.manager.append(sequence):
                self._compute(sequence)
            else:
                self._end(sequence)
        else:
            self._end(rng.choice(self._running))
        if rng.random() < 0.003:
            self.manager.clear()
        if events := self.manager.cache.take_events():
            self.publisher.publish(events)
        if self._faults.strikes("unknown parent", 0.005):
            orphan = Stored(rng.getrandbits(63) | 1, rng.randbytes(8), rng.randbytes(8))
            self.publisher.publish([orphan])
        if self._faults.strikes("unknown removal of an old incarnation", 0.005):
            last_words = KvEventBatch(MAJOR, self.key[0], self.key[1] - 1, 10_000, time.time(), [])
            subject = kv_events_subject("default", self.key[0])
            asyncio.ensure_future(self._nats.publish(subject, encode_batch(last_words)))  # noqa: RUF006

    def _compute(self, sequence: Sequence) -> None:
        sequence.num_computed_tokens = sequence.num_tokens
        self.manager.commit(sequence)

    def _end(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.manager.free(sequence)

    async def snapshot(self) -> AsyncIterator[SnapshotChunk]:
        if self._faults.strikes("snapshot refused", 0.2):
            raise ConnectionError("not now")
        self.snapshots += 1
        event_id, runs = self.publisher.last_event_id, self.manager.cache.runs()
        half = len(runs) // 2
        yield SnapshotChunk(self.key[1], event_id, runs[:half], last=False)
        await asyncio.sleep(0.002)
        if self._faults.strikes("snapshot broken off", 0.1):
            raise ConnectionError("broken off")
        yield SnapshotChunk(self.key[1], event_id, runs[half:], last=True)

    def record(self) -> WorkerRecord:
        worker_id, incarnation = self.key
        return WorkerRecord(
            RECORD_MAJOR, worker_id, incarnation, "decode", "ready", "", None, "tiny", "", BLOCK_SIZE, 48, 192, 1
        )

    def table(self) -> set[tuple[int, int]]:
        return _homes(self.manager.cache.runs())

    def load(self) -> WorkerLoad:
        return WorkerLoad(blocks_cached=self.manager.num_cached, last_event_id=self.publisher.last_event_id)


class FaultyCluster:
    def __init__(self, router_nats: NatsClient, worker_nats: NatsClient, seed: int, num_workers: int = 4) -> None:
        self.rng = random.Random(seed)
        self.faults = Faults(seed + 1)
        self._router_nats = router_nats
        self._worker_nats = worker_nats
        self.workers = [FaultyWorker(worker_nats, self.faults, f"w{n}", 1) for n in range(num_workers)]
        self.indexer = self._new_indexer()

    async def start(self) -> None:
        await self.indexer.start()
        for worker in self.workers:
            self.indexer.apply(Change("added", worker.record()))

    async def close(self) -> None:
        await self.indexer.close()
        for worker in self.workers:
            await worker.publisher.close()

    async def restart_worker(self, at: int) -> None:
        """With another incarnation, and an empty cache."""
        old = self.workers[at]
        self.indexer.apply(Change("removed", old.record()))
        await old.publisher.close()
        self.workers[at] = FaultyWorker(self._worker_nats, self.faults, old.key[0], old.key[1] + 1)
        self.indexer.apply(Change("added", self.workers[at].record()))

    async def restart_router(self) -> None:
        """What it knew is gone."""
        await self.indexer.close()
        for subscription in list(self._router_nats._client._subs.values()):
            if "kv_events" in subscription.subject:
                await subscription.unsubscribe()
        self.indexer = self._new_indexer()
        await self.start()

    def report_loads(self) -> None:
        for worker in self.workers:
            self.indexer.observe(worker.key, worker.load())

    def differing(self) -> dict[str, tuple[int, int]]:
        """Workers whose blocks the tree does not have right: (missing in the tree, too many in the tree)."""
        differing = {}
        for worker in self.workers:
            truth, believed = worker.table(), _homes(self.indexer.tree.dump(worker.key))
            if truth != believed:
                differing[worker.key[0]] = (len(truth - believed), len(believed - truth))
        return differing

    async def until_right(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while self.differing() or not self.indexer.settled:
                    self.report_loads()
                    await asyncio.sleep(0.02)
        except TimeoutError:
            notes = {worker.key[0]: self.indexer.note(worker.key) for worker in self.workers}
            raise AssertionError(f"differing: {self.differing()}, notes: {notes}") from None

    def _new_indexer(self) -> Indexer:
        return Indexer(FaultyReceiver(self._router_nats, self.faults), self._fetch)  # type: ignore[arg-type]

    def _fetch(self, worker_id: str, incarnation: int) -> AsyncIterator[SnapshotChunk]:
        for worker in self.workers:
            if worker.key == (worker_id, incarnation):
                return worker.snapshot()
        raise ConnectionError("gone")


def _homes(runs: Iterable[Stored]) -> set[tuple[int, int]]:
    """(sequence hash, home) of each block"""
    return {(name, run.home) for run in runs for name in np.frombuffer(run.sequence_hashes, dtype="<u8").tolist()}


def _acknowledged() -> "asyncio.Future[PubAck]":
    future: asyncio.Future[PubAck] = asyncio.get_running_loop().create_future()
    future.set_result(PubAck(stream="", seq=0))
    return future
