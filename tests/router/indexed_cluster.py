"""Workers that publish what they cache over a real NATS server, and an indexer that follows them."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable

import numpy as np

from baton.service.local.nats_server import NatsServer
from baton_proto.discovery import MAJOR as RECORD_MAJOR, WorkerLoad, WorkerRecord
from baton_proto.kv_events import MAJOR, Cleared, KvEvent, KvEventBatch, Removed, Stored, encode_batch
from baton_proto.worker import SnapshotChunk
from router.index.indexer import Indexer
from router.index.radix_tree import RadixTree
from runtime.blocks.block_hash import sequence_hashes
from runtime.discovery.directory import Change
from runtime.discovery.worker_key import WorkerKey
from runtime.kv_events.publisher import EventPublisher, stream_config
from runtime.nats.client import NatsClient
from runtime.nats.subjects import kv_events_subject


def blocks(path: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(path, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def stored(path: list[int], known: int = 0) -> Stored:
    hashes = blocks(path)
    sequences = sequence_hashes(hashes)
    parent = int(sequences[known - 1]) if known else None
    return Stored(parent, hashes[known:].tobytes(), sequences[known:].tobytes())


def removed(path: list[int], kept: int) -> Removed:
    return Removed(sequence_hashes(blocks(path))[kept:][::-1].tobytes())


class Cache:
    """A worker's own block table, as a tree that never misses an event."""

    def __init__(self, worker_id: str, incarnation: int) -> None:
        self.key: WorkerKey = (worker_id, incarnation)
        self.tree = RadixTree()

    def store(self, path: list[int], known: int = 0) -> KvEvent:
        event = stored(path, known)
        self.tree.apply_stored(self.key, event.parent, event.block_hashes, event.sequence_hashes)
        return event

    def evict(self, path: list[int], kept: int) -> KvEvent:
        event = removed(path, kept)
        self.tree.apply_removed(self.key, event.sequence_hashes)
        return event

    def holds(self, path: list[int]) -> int:
        return self.tree.find(blocks(path)).get(self.key, 0)

    def random_event(self, rng: random.Random) -> list[KvEvent]:
        path = [rng.randint(1, 3) for _ in range(rng.randint(1, 8))]
        held = self.holds(path)
        if rng.random() < 0.02:
            self.tree.clear(self.key)
            return [Cleared()]
        if held == len(path):
            return [self.evict(path, rng.randrange(len(path)))] if not self._has_children(path) else []
        return [self.store(path, held)]

    def _has_children(self, path: list[int]) -> bool:
        return any(self.holds([*path, more]) > len(path) for more in (1, 2, 3))


class FakeWorker:
    """Publishes its cache's events and answers snapshots, as a worker process does."""

    def __init__(self, nats: NatsClient, worker_id: str = "w", incarnation: int = 1) -> None:
        self.cache = Cache(worker_id, incarnation)
        self.key = self.cache.key
        self.publisher = EventPublisher(nats, worker_id, incarnation)
        self.snapshots_fail = 0
        self.snapshots = 0
        self.pause: asyncio.Event | None = None  # a snapshot waits for it between its chunks

    def publish(self, *events: KvEvent) -> None:
        self.publisher.publish(list(events))

    def record(self) -> WorkerRecord:
        worker_id, incarnation = self.key
        return WorkerRecord(
            RECORD_MAJOR, worker_id, incarnation, "decode", "ready", "", None, "tiny", "", 16, 100, 1600, 1
        )

    async def snapshot(self) -> AsyncIterator[SnapshotChunk]:
        if self.snapshots_fail:
            self.snapshots_fail -= 1
            raise ConnectionError("not reachable now")
        self.snapshots += 1
        event_id, runs = self.publisher.last_event_id, list(self.cache.tree.dump(self.key))
        half = len(runs) // 2
        yield SnapshotChunk(self.key[1], event_id, runs[:half], last=False)
        if self.pause is not None:
            await self.pause.wait()
        yield SnapshotChunk(self.key[1], event_id, runs[half:], last=True)


class Cluster:
    """An indexer with its own connection and any number of workers on another one."""

    def __init__(self, server: NatsServer, router_nats: NatsClient, worker_nats: NatsClient) -> None:
        self.server = server
        self.router_nats = router_nats
        self.worker_nats = worker_nats
        self.workers: dict[str, FakeWorker] = {}
        self.indexer = Indexer(router_nats, self._fetch)

    def _fetch(self, worker_id: str, incarnation: int) -> AsyncIterator[SnapshotChunk]:
        assert self.workers[worker_id].key == (worker_id, incarnation)
        return self.workers[worker_id].snapshot()

    async def add(self, worker_id: str = "w", incarnation: int = 1) -> FakeWorker:
        worker = FakeWorker(self.worker_nats, worker_id, incarnation)
        self.workers[worker_id] = worker
        self.indexer.apply(Change("added", worker.record()))
        await self.until(lambda: self.indexer.note(worker.key) == "")
        return worker

    async def remove(self, worker: FakeWorker) -> None:
        self.indexer.apply(Change("removed", worker.record()))
        await worker.publisher.close()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.005)

    async def until_equal(self, worker: FakeWorker, timeout_s: float = 60.0) -> None:
        """The tree holds exactly what the worker holds."""
        try:
            await self.until(lambda: table(self.indexer.tree, worker) == table(worker.cache.tree, worker), timeout_s)
        except TimeoutError:
            assert table(self.indexer.tree, worker) == table(worker.cache.tree, worker)
            raise

    def report_load(self, worker: FakeWorker) -> None:
        self.indexer.observe(worker.key, WorkerLoad(last_event_id=worker.publisher.last_event_id))


def table(tree: RadixTree, worker: FakeWorker) -> set[int]:
    held = b"".join(run.sequence_hashes for run in tree.dump(worker.key))
    return set(np.frombuffer(held, dtype="<u8").tolist())


async def raw(cluster: Cluster, worker: FakeWorker, event_id: int, *events: KvEvent, store: bool = True) -> None:
    """A batch with any id, past the publisher."""
    batch = KvEventBatch(MAJOR, worker.key[0], worker.key[1], event_id, time.time(), list(events))
    subject = kv_events_subject("default", worker.key[0])
    if store:
        await cluster.worker_nats.ensure_stream(stream_config("default"))
        await cluster.worker_nats.publish_stored(subject, encode_batch(batch))
    else:
        await cluster.worker_nats.publish(subject, encode_batch(batch))
