"""Synthetic workers and routers on a real NATS server, for the tests of `baton events`."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from baton.events.event_source import EventSource
from baton.service.local.nats_server import NatsServer
from baton_proto.kv_events import Cleared, KvEvent, Removed, Stored
from baton_proto.worker import SnapshotChunk
from router.index.indexer import Indexer
from runtime.discovery.directory import Directory
from runtime.discovery.load_board import LoadBoard
from runtime.discovery.worker_key import WorkerKey
from runtime.nats.client import NatsClient
from tests.router.indexed_cluster import removed, stored

__all__ = ["Cleared", "KvEvent", "Removed", "Router", "Stored", "Workers", "baton", "removed", "running", "stored"]

BATON = [sys.executable, "-m", "baton"]
TTL_S = 4.0


class Workers:
    """Known by their events alone, which is all that these commands look at."""

    def __init__(self, nats: NatsClient) -> None:
        self._nats = nats
        self._sources: dict[str, EventSource] = {}

    async def add(self, worker_id: str) -> EventSource:
        if worker_id in self._sources:
            await self._sources.pop(worker_id).close()
        source = self._sources[worker_id] = EventSource(self._nats, worker_id, "tiny", 16)
        await source.start(5)
        return source

    async def publish(self, worker_id: str, *batches: list[KvEvent]) -> EventSource:
        """Returns when they are stored."""
        source = self._sources.get(worker_id) or await self.add(worker_id)
        for batch in batches:
            source.publish(batch)
        await source.drain(10, limit=0)
        return source

    async def close(self) -> None:
        for source in self._sources.values():
            await source.close()


class Router:
    """A router's indexer and what feeds it."""

    def __init__(self, nats: NatsClient) -> None:
        self.directory = Directory(nats, TTL_S)
        self.indexer = Indexer(nats, _no_snapshot)
        self.directory.on_change(self.indexer.apply)
        self._loads = LoadBoard(nats)  # what came before its worker was known is missed, and the worker's load tells so
        self._loads.on_report(self.indexer.load_report)

    async def start(self) -> None:
        await self.indexer.start()
        await self._loads.start()
        await self.directory.start()

    async def close(self) -> None:
        await self.directory.close()
        await self.indexer.close()

    @property
    def table(self) -> dict[str, set[Stored]]:
        """The runs that each worker holds, by worker id."""
        return {worker: set(self.indexer.tree.dump(self._key(worker))) for worker in self.directory.workers}

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.005)

    async def until_table(self, table: dict[str, set[Stored]]) -> None:
        try:
            await self.until(lambda: self.table == table)
        except TimeoutError:
            assert self.table == table
            raise

    def _key(self, worker_id: str) -> WorkerKey:
        return (worker_id, self.directory.workers[worker_id].incarnation)


@asynccontextmanager
async def running(nats: NatsClient) -> AsyncIterator[Router]:
    router = Router(nats)
    await router.start()
    try:
        yield router
    finally:
        await router.close()


async def _no_snapshot(worker_id: str, incarnation: int) -> AsyncIterator[SnapshotChunk]:
    raise AssertionError(f"{worker_id} cannot be asked")
    yield


async def baton(server: NatsServer, *arguments: str) -> asyncio.subprocess.Process:
    """The real program, running."""
    return await asyncio.create_subprocess_exec(
        *BATON,
        "events",
        *arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"BATON_NATS_URL": server.url},
    )
