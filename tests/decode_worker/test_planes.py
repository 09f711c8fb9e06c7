"""A worker on the event, metrics and discovery planes, and how it leaves. Real processes and a real NATS."""

import asyncio
import urllib.request
from pathlib import Path

import msgspec
import numpy as np
import pytest

from baton_proto.discovery import LoadReport, WorkerRecord, decode_load_report, decode_record
from baton_proto.kv_events import Cleared, KvEventBatch, Removed, Stored, decode_batch
from runtime.config.serving import EngineConfig, ServingConfig
from runtime.nats.client import NatsClient, connect
from runtime.nats.subjects import kv_events_subject, load_subject, workers_key, workers_stream
from tests.worker.router_client import RouterClient
from tests.worker.worker_process import WorkerProcess, prompt, start_worker

# One event loop for all: gRPC's poller stumbles over loops that were closed.
pytestmark = pytest.mark.asyncio(loop_scope="session")


async def record_of(nats: NatsClient, worker: WorkerProcess) -> WorkerRecord | None:
    message = await nats.stored_message(workers_stream(nats.namespace), workers_key(nats.namespace, worker.worker_id))
    return decode_record(message.data) if message and message.data else None


def apply(batches: list[KvEventBatch]) -> dict[int, tuple[int | None, int]]:
    """The block table that the events describe, sequence hash -> (parent, block hash), checked block by block."""
    table: dict[int, tuple[int | None, int]] = {}
    for batch in batches:
        for event in batch.events:
            match event:
                case Stored():
                    add(table, event)
                case Removed():
                    for sequence_hash in np.frombuffer(event.sequence_hashes, "<u8").tolist():
                        del table[sequence_hash]
                        assert sequence_hash not in {parent for parent, _ in table.values()}
                case Cleared():
                    table.clear()
    return table


def add(table: dict[int, tuple[int | None, int]], run: Stored) -> None:
    parent = run.parent
    sequence_hashes = np.frombuffer(run.sequence_hashes, "<u8").tolist()
    for sequence_hash, block_hash in zip(sequence_hashes, np.frombuffer(run.block_hashes, "<u8").tolist(), strict=True):
        assert parent is None or parent in table
        table[sequence_hash] = (parent, block_hash)
        parent = sequence_hash


async def test_a_snapshot_holds_what_the_events_up_to_its_id_say(
    config: ServingConfig, folder: Path, mortal: list[WorkerProcess]
) -> None:
    """Taken again and again while a small pool stores and evicts."""
    small = msgspec.structs.replace(config, engine=EngineConfig(kv_memory="1MiB", max_batch_tokens=64, threads=1))
    assert config.nats.url is not None
    nats = await connect(config.nats.url, "test", config.namespace)
    batches: list[KvEventBatch] = []
    await nats.subscribe(
        kv_events_subject(config.namespace, "decode-small"), lambda _, data, __: batches.append(decode_batch(data))
    )
    await nats.flush()
    worker = await start_worker("decode", "decode-small", small, folder)
    mortal.append(worker)
    snapshots = []
    async with RouterClient(worker) as router:
        shared = prompt(64, seed=400)
        answers = [
            await router.submit(shared + prompt(100 + number, seed=401 + number), max_tokens=20) for number in range(12)
        ]
        while not all(answer.ended for answer in answers):
            snapshots.append(await worker.snapshot())
        assert all(answer.finish == "length" for answer in answers)
        snapshots.append(await worker.snapshot())
        last_event_id = (await worker.until_idle()).load.last_event_id
    async with asyncio.timeout(30):
        while len(batches) < last_event_id:
            await asyncio.sleep(0.01)
    await nats.close()

    assert [batch.event_id for batch in batches] == list(range(1, last_event_id + 1))
    assert any(isinstance(event, Removed) for batch in batches for event in batch.events)
    assert len({chunks[0].event_id for chunks in snapshots}) > 2
    for chunks in snapshots:
        table: dict[int, tuple[int | None, int]] = {}
        for chunk in chunks:
            for run in chunk.runs:
                add(table, run)
        assert table == apply([batch for batch in batches if batch.event_id <= chunks[0].event_id])


async def test_an_inspected_worker_counts_the_events_that_it_still_gathers(
    config: ServingConfig, folder: Path, mortal: list[WorkerProcess]
) -> None:
    worker = await start_worker("decode", "decode-patient", config, folder)
    mortal.append(worker)
    last_event_ids = []
    async with RouterClient(worker) as router:
        for seed in range(3):
            await (await router.submit(prompt(64, seed=500 + seed), max_tokens=1)).end()
            last_event_ids.append((await worker.until_idle()).load.last_event_id)
    assert last_event_ids == sorted(set(last_event_ids)), "each prompt's blocks are in a batch of their own"


async def test_a_ready_worker_is_announced_with_what_routers_need(
    config: ServingConfig, decode: WorkerProcess, prefill_shm: WorkerProcess
) -> None:
    assert config.nats.url is not None
    nats = await connect(config.nats.url, "test", config.namespace)
    record, prefill_record = await record_of(nats, decode), await record_of(nats, prefill_shm)
    await nats.close()
    assert record is not None
    assert prefill_record is not None
    assert (record.role, record.state, record.incarnation) == ("decode", "ready", decode.incarnation)
    assert record.rpc_address == decode.addresses["rpc"]
    assert record.stream_address == decode.addresses["stream"]
    assert record.transfer is not None
    assert (record.block_size, record.num_blocks, record.max_model_len) == (16, 512, 4096)
    assert record.pid == decode.process.pid
    assert (prefill_record.role, prefill_record.transfer) == ("prefill", None)
    assert (prefill_record.model, prefill_record.model_hash) == (record.model, record.model_hash)
    assert record.model == "tiny-llama"


async def test_load_is_reported_while_nothing_happens(config: ServingConfig, decode: WorkerProcess) -> None:
    assert config.nats.url is not None
    nats = await connect(config.nats.url, "test", config.namespace)
    reports: asyncio.Queue[LoadReport] = asyncio.Queue()
    await nats.subscribe(
        load_subject(config.namespace, decode.worker_id),
        lambda _, data, __: reports.put_nowait(decode_load_report(data)),
    )
    first, second = [await asyncio.wait_for(reports.get(), 60) for _ in range(2)]
    await nats.close()
    assert (first.worker_id, first.incarnation) == ("decode-0", decode.incarnation)
    assert (second.load.running, second.load.blocks_total) == (0, 512)


async def test_metrics_count_steps_tokens_and_transfers(decode: WorkerProcess, prefill_shm: WorkerProcess) -> None:
    async with RouterClient(decode) as router:
        await (await router.submit(prompt(40, seed=450), prefill=prefill_shm.target)).end()
    await asyncio.gather(decode.until_idle(), prefill_shm.until_idle())
    for worker in (decode, prefill_shm):
        values = await asyncio.to_thread(scrape, worker)
        for name in ("output_tokens_total", "transfers_total", "transfer_bytes_total", "step_duration_seconds_count"):
            assert values[f"baton_worker_{name}"] > 0, name
        assert values["baton_worker_kv_blocks_capacity"] == 512


def scrape(worker: WorkerProcess) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{worker.addresses['metrics']}/metrics", timeout=5) as response:
        lines = response.read().decode().splitlines()
    samples = [line.rpartition(" ") for line in lines if line.startswith("baton_worker_") and "_bucket{" not in line]
    assert all(f'worker="{worker.worker_id}"' in name for name, _, _ in samples)
    return {name.partition("{")[0]: float(value) for name, _, value in samples}


async def test_sigterm_lets_requests_end_refuses_new_ones_and_leaves_discovery(
    config: ServingConfig, folder: Path, mortal: list[WorkerProcess]
) -> None:
    assert config.nats.url is not None
    nats = await connect(config.nats.url, "test", config.namespace)
    worker = await start_worker("decode", "decode-leaving", config, folder)
    mortal.append(worker)
    async with RouterClient(worker) as router:
        answer = await router.submit(prompt(40, seed=460), max_tokens=600)
        await answer.tokens(2)
        worker.terminate()
        await worker.until("draining", lambda report: report.state == "draining")
        refused = await (await router.submit(prompt(10, seed=461))).end()
        assert refused.failure is not None
        assert (refused.failure.code, refused.failure.retryable) == ("refused", True)
        assert (await answer.end()).finish == "length"
        assert len(answer.token_ids) == 600
        assert await worker.exit_code() == 0
    assert await record_of(nats, worker) is None
    await nats.close()


async def test_what_outlives_the_drain_timeout_is_handed_back_to_the_router(
    config: ServingConfig, folder: Path, mortal: list[WorkerProcess]
) -> None:
    hasty = msgspec.structs.replace(config, workers=msgspec.structs.replace(config.workers, drain_timeout_s=0.2))
    worker = await start_worker("decode", "decode-hasty", hasty, folder)
    mortal.append(worker)
    async with RouterClient(worker) as router:
        answer = await router.submit(prompt(40, seed=470), max_tokens=4000)
        await answer.tokens(2)
        worker.terminate()
        await answer.end()
        assert answer.failure is not None
        assert (answer.failure.code, answer.failure.retryable) == ("refused", True)
        assert await worker.exit_code() == 0


async def test_a_drain_call_waits_for_requests_and_the_worker_stays(
    config: ServingConfig, folder: Path, mortal: list[WorkerProcess], decode: WorkerProcess
) -> None:
    worker = await start_worker("prefill", "prefill-drained", config, folder)
    mortal.append(worker)
    async with RouterClient(decode) as router, RouterClient(worker) as its_own:
        kept = await its_own.submit(prompt(40, seed=482), max_tokens=3000)
        await kept.tokens(2)
        answer = await router.submit(prompt(4000, seed=480), prefill=worker.target, max_tokens=2)
        await worker.until("running", lambda report: report.load.running == 2 or answer.token_ids)
        async with worker.client as client:
            assert (await client.drain(60.0)).remaining == 0
        assert (await answer.end()).finish == "length"
        assert len((await kept.end()).token_ids) == 3000
        refused = await (await router.submit(prompt(20, seed=481), prefill=worker.target)).end()
        assert refused.failure is not None
        assert (refused.failure.code, refused.failure.worker_id) == ("prefill_failed", "prefill-drained")
        assert (await worker.inspect()).state == "draining"
