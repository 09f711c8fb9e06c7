"""A worker that caches blocks and publishes no events is named where an operator looks, by a real service."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from msgspec.structs import replace

from baton_proto.discovery import MAJOR, LoadReport, WorkerLoad, decode_record
from baton_proto.worker import SnapshotChunk, SnapshotRequest
from router.index.followed_worker import SILENT_NOTE
from runtime.discovery.directory import Announcer
from runtime.discovery.load_board import publish_load
from runtime.nats.client import NatsClient
from runtime.nats.subjects import workers_key, workers_stream
from tests.baton.cli.test_cli import baton
from tests.router.scripted_worker import ScriptedWorker
from tests.service import Service, running_service

MUTE = "decode-mute"
METRIC = "baton_router_worker_without_events"


class MuteWorker(ScriptedWorker):
    """Its load says that it caches blocks; nothing else ever does."""

    async def _snapshot(self, request: SnapshotRequest, context: Any) -> AsyncIterator[SnapshotChunk]:
        yield SnapshotChunk(self.incarnation, 0, [], last=True)


async def until_named(service: Service, nats: NatsClient, mute: MuteWorker) -> dict[str, str]:
    """The notes of all workers."""
    load = WorkerLoad(blocks_cached=5, blocks_total=256)
    deadline_s = time.monotonic() + 30
    while True:
        await publish_load(nats, LoadReport(version=MAJOR, worker_id=MUTE, incarnation=mute.incarnation, load=load))
        notes = {worker.worker_id: worker.note for worker in (await service.client.status(60)).workers}
        if SILENT_NOTE in notes.get(MUTE, ""):
            return notes
        assert time.monotonic() < deadline_s, notes
        await asyncio.sleep(0.25)


async def test_a_worker_without_events_is_named_in_status_metrics_and_log(tiny_model: Path) -> None:
    async with (
        running_service(tiny_model, 0, 1) as service,
        MuteWorker(MUTE, key=service.supervisor.keys.cluster) as mute,
        httpx.AsyncClient(timeout=60) as http,
    ):
        (healthy,) = service.workers("decode")
        nats = await service.connect_nats(MUTE)
        told = await nats.stored_message(workers_stream(nats.namespace), workers_key(nats.namespace, healthy))
        assert told is not None
        assert told.data is not None
        like = decode_record(told.data)
        record = replace(mute.record(), model=like.model, model_hash=like.model_hash, kv_form=like.kv_form)
        announcer = Announcer(nats, record, 0.5)
        await announcer.start()
        notes = await until_named(service, nats, mute)
        assert (notes[MUTE], notes[healthy]) == (SILENT_NOTE, "")
        metrics = (await http.get(f"{service.http_url}/metrics")).text
        assert f'{METRIC}{{worker="{MUTE}"}} 1.0' in metrics
        assert f'{METRIC}{{worker="{healthy}"}} 0.0' in metrics
        assert "baton_router_workers_with_trouble 1.0" in metrics
        assert "worker publishes no events" in service.log("router-1")
        shown = await baton(service, "status")
        assert f"{MUTE}: {notes[MUTE]}" in shown.stdout
        await announcer.withdraw()
        await nats.close()
