"""What routers and planners read off NATS, against publishers that know the words and not the rules."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st
from structlog.testing import capture_logs

from baton.service.local.nats_server import NatsServer
from baton_proto.discovery import LoadReport, WorkerRecord
from baton_proto.kv_events import KvEventBatch
from baton_proto.routers.charges import ChargeReport
from baton_proto.routers.router_report import RouterReport
from baton_proto.worker import SnapshotChunk
from planner.observing.router_board import RouterBoard
from router.index.indexer import Indexer
from router.workers.charge_sharing import ChargeSharing
from router.workers.load import LoadLedger
from runtime.discovery.directory import Directory
from runtime.discovery.load_board import LoadBoard
from runtime.nats.client import NatsClient, connect
from runtime.nats.subjects import charges_subject, kv_events_subject, load_subject, router_subject, workers_key
from tests.fuzz.budget import fuzzed
from tests.fuzz.shapes import almost, messages

WORKERS = st.sampled_from(("decode-0", "decode-1", "prefill-0"))
HASHES = st.lists(st.integers(1, 9), max_size=4).map(lambda hashes: np.array(hashes, dtype="<u8").tobytes())
USUAL: dict[str, st.SearchStrategy[Any]] = {
    "version": st.just(1),
    "worker_id": WORKERS,
    "incarnation": st.sampled_from((1, 2)),
    "event_id": st.integers(1, 6),
    "parent": st.one_of(st.none(), st.integers(1, 9)),
    "block_hashes": HASHES,
    "sequence_hashes": HASHES,
    "router_id": st.sampled_from(("router-0", "router-1")),
}
Subject = Callable[[str, str], str]
PLANES: list[tuple[Subject, Any, Callable[[Any], bytes]]] = [
    (load_subject, LoadReport, msgspec.msgpack.encode),
    (kv_events_subject, KvEventBatch, msgspec.msgpack.encode),
    (charges_subject, ChargeReport, msgspec.msgpack.encode),
    (router_subject, RouterReport, msgspec.msgpack.encode),
    (workers_key, WorkerRecord, msgspec.json.encode),
]
published = st.lists(
    st.one_of(
        [
            st.tuples(st.just(subject), WORKERS, almost(st.builds(encode, messages(kind, **USUAL))))
            for subject, kind, encode in PLANES
        ]
    ),
    min_size=1,
    max_size=30,
)


async def no_snapshot(worker_id: str, incarnation: int) -> AsyncIterator[SnapshotChunk]:
    yield SnapshotChunk(incarnation, 0, [], last=True)


async def hear(url: str, said: list[tuple[Subject, str, bytes]], number: int) -> list[Any]:
    """Error lines of the log while all readers of a namespace of its own hear what is said."""
    namespace = f"n{number}"
    with capture_logs() as logs:
        async with AsyncExitStack() as closing:
            clients = []
            for name in ("router", "stranger"):
                clients.append(await connect(url, name, namespace, timeout_s=60))
                closing.push_async_callback(clients[-1].close)
            ours, theirs = clients
            directory, board = await listen(ours, closing)
            for subject, worker_id, payload in said:
                await theirs.publish(subject(namespace, worker_id), payload)
            await theirs.flush()
            await ours.flush()
            await ours.flush()  # after our own answers
            assert set(directory.workers) <= {"decode-0", "decode-1", "prefill-0"}
            board.take_interval([])
            board.queue()
    return [row for row in logs if row["log_level"] == "error"]


async def listen(nats: NatsClient, closing: AsyncExitStack) -> tuple[Directory, RouterBoard]:
    directory, loads, board = Directory(nats, ttl_s=20), LoadBoard(nats), RouterBoard(nats)
    indexer = Indexer(nats, no_snapshot)
    sharing = ChargeSharing(nats, LoadLedger(16, 60.0), asyncio.Event(), "router-9")
    directory.on_change(indexer.apply)
    loads.on_report(indexer.load_report)
    for reader in (indexer, directory, sharing):
        await reader.start()
        closing.push_async_callback(reader.close)
    await loads.start()
    await board.start()
    return directory, board


@pytest.mark.slow
async def test_readers_of_nats_outlive_every_publisher(nats_server: NatsServer) -> None:
    number = 0

    @fuzzed(seconds=1)
    @given(said=published)
    def search(said: list[tuple[Subject, str, bytes]]) -> None:
        nonlocal number
        number += 1
        assert asyncio.run(hear(nats_server.url, said, number)) == []

    await asyncio.to_thread(search)
