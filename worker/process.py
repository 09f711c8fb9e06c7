"""A worker from start to end, alone in its process or with others."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import structlog

from baton_proto.decoding import MAX_TEXT
from baton_proto.discovery import MAJOR, WorkerRecord
from baton_proto.routers.left import decode_left_answer
from baton_proto.spoken import SPOKEN
from baton_proto.worker import STEPS, Failure
from runtime.address import with_host
from runtime.config.serving import ServingConfig
from runtime.discovery.directory import Announcer
from runtime.discovery.load_board import publish_load
from runtime.discovery.worker_key import new_incarnation
from runtime.errors import ConfigError, UnavailableError
from runtime.host import process_name
from runtime.kv_events.publisher import EventPublisher
from runtime.nats.client import NatsClient, connect
from runtime.nats.subjects import left_answers_subject
from runtime.processes.open_files import raise_open_files
from runtime.processes.reached_at import with_announced_workers
from runtime.processes.serving import StopSignal, print_ready
from runtime.security.keys import Keys, check_reach, load_keys
from worker.changes.adapters import load_wanted
from worker.engines.base import EngineAssembly
from worker.metrics import MetricsEndpoint, WorkerMetrics
from worker.rpc_server import WorkerService
from worker.runtime import WorkerRuntime
from worker.stream_server import StreamServer
from worker.worker import Worker

LOAD_INTERVAL_S = 1.0
END_GRACE_S = 2.0  # for requests that the end of the drain timeout cut off
GATHER_EVENTS_S = 0.02  # KV events leave at most so often: 50 ms would save 2 to 14 % of a router, which knows later
STOP_TIMEOUT_S = 10.0
FLUSH_POLL_S = 0.02

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class SharedParts:
    """What the workers of one process have in common."""

    config: ServingConfig
    keys: Keys
    nats: NatsClient
    metrics: MetricsEndpoint
    metrics_address: str


@asynccontextmanager
async def shared_parts(config: ServingConfig, name: str) -> AsyncIterator[SharedParts]:
    """Raises ConfigError, or UnavailableError when NATS does not answer."""
    nats_url = config.nats.url
    if nats_url is None:
        raise ConfigError("nats.url", "a worker needs the URL of a running NATS server")
    config = with_announced_workers(config)
    keys = load_keys(config)
    check_reach("workers.host", config.workers.host, keys)
    raise_open_files()  # peers, routers, and who connects without a key
    nats = await connect(nats_url, name, config.namespace, config.workers.ready_timeout_s, keys.nats)
    metrics = MetricsEndpoint()
    metrics.watch(nats)
    try:
        yield SharedParts(config, keys, nats, metrics, metrics.serve(config.workers.host, keys))
    finally:
        metrics.close()
        await nats.close()


async def serve_worker(
    shared: SharedParts,
    worker_id: str,
    build_role: type[Worker],
    assembly: EngineAssembly,
    stop: StopSignal,
    on_ready: Callable[[WorkerRecord], None],
) -> None:
    """Runs one worker from its start until `stop`, then drains it. What is built last is closed first."""
    config, keys, nats = shared.config, shared.keys, shared.nats
    async with AsyncExitStack() as closing:
        closing.callback(assembly.close)
        incarnation = new_incarnation()
        publisher = EventPublisher(nats, worker_id, incarnation, gather_s=GATHER_EVENTS_S)
        closing.push_async_callback(publisher.close)
        metrics = WorkerMetrics(shared.metrics, worker_id, build_role.name, assembly.engine, publisher)
        runtime = WorkerRuntime(config, worker_id, incarnation, assembly, publisher, metrics, keys)
        closing.push_async_callback(runtime.bridge.stop, STOP_TIMEOUT_S)
        role = build_role(runtime)
        closing.push_async_callback(role.peers.close)
        streams = runtime.attach(role)
        runtime.bridge.start()

        def take(renewed: ServingConfig) -> None:
            runtime.bridge.post(lambda engine: engine.aim(renewed.step_targets))

        stop.renewed.append(take)
        closing.callback(stop.renewed.remove, take)

        service = WorkerService(runtime)
        rpc_address = await service.start(config.workers.host)
        closing.push_async_callback(service.stop, END_GRACE_S)
        server = StreamServer(runtime.hello, {STEPS: streams.serve} | role.peers.stream_handlers(), keys.cluster)
        stream_address = await server.start(config.workers.host)
        closing.push_async_callback(server.stop, END_GRACE_S)
        closing.callback(streams.close)
        closing.callback(role.peers.end_streams)

        await runtime.read_vocabulary()
        runtime.lacks = await load_wanted(assembly, config.adapters, nats)
        runtime.note_weights()
        record = _record(runtime, rpc_address, stream_address, shared.metrics_address)
        runtime.announcer = Announcer(nats, record)
        await runtime.announcer.start()
        closing.push_async_callback(runtime.announcer.withdraw)
        reports = asyncio.create_task(_report_load(runtime, nats))
        closing.callback(reports.cancel)
        await _answer_for_left(runtime, nats, closing)
        on_ready(record)

        await _until_stopped(stop, runtime)
        await _drain(runtime)


async def _answer_for_left(runtime: WorkerRuntime, nats: NatsClient, closing: AsyncExitStack) -> None:
    async def answer(question: bytes) -> bytes | None:
        return runtime.role.left_answer(decode_left_answer(question))

    subscription = await nats.answer(left_answers_subject(nats.namespace), answer)
    closing.push_async_callback(nats.unsubscribe, subscription)


async def _until_stopped(stop: asyncio.Event, runtime: WorkerRuntime) -> None:
    """Returns when `stop` is set. When the engine ends first, raises what ended it; UnavailableError when the role can
    serve no more."""
    stopped, ended = asyncio.create_task(stop.wait()), asyncio.create_task(runtime.bridge.ended())
    while not stopped.done():
        await asyncio.wait({stopped, ended}, timeout=LOAD_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            ended.result()
        if problem := runtime.role.peers.problem:
            raise UnavailableError(problem)
    ended.cancel()


async def _drain(runtime: WorkerRuntime) -> None:
    """Prefixes in memory have what requests leave of the drain timeout to get to the disk."""
    began_s, timeout_s = time.monotonic(), runtime.config.workers.drain_timeout_s
    log.info("draining", in_flight=len(runtime.role.in_flight))
    remaining = await runtime.drain(timeout_s)
    if remaining:
        log.warning("drain timeout: requests cut off", remaining=remaining)
        message = f"{runtime.worker_id} drained before the request ended"
        runtime.role.end_all(Failure("refused", message, retryable=True, worker_id=runtime.worker_id))
        await runtime.role.in_flight.wait_empty(END_GRACE_S)
    if runtime.config.engine.disk_kv.folder is not None:
        await _flush(runtime, began_s + timeout_s)


async def _flush(runtime: WorkerRuntime, until_s: float) -> None:
    with suppress(UnavailableError):  # the engine has ended
        while await runtime.bridge.call(lambda engine: engine.flush()) and time.monotonic() < until_s:
            await asyncio.sleep(FLUSH_POLL_S)


async def _report_load(runtime: WorkerRuntime, nats: NatsClient) -> None:
    while True:
        report = await runtime.load_report()
        runtime.metrics.observe(report.load)
        await publish_load(nats, report)
        await runtime.tell()
        await asyncio.sleep(LOAD_INTERVAL_S)


def _record(runtime: WorkerRuntime, rpc_address: str, stream_address: str, metrics_address: str) -> WorkerRecord:
    assembly, host = runtime.assembly, runtime.config.workers.reached_at
    return WorkerRecord(
        version=MAJOR,
        worker_id=runtime.worker_id,
        incarnation=runtime.incarnation,
        role=runtime.role.name,
        state=runtime.state,
        rpc_address=with_host(rpc_address, host),
        stream_address=with_host(stream_address, host),
        transfer=runtime.role.peers.endpoint,
        model=assembly.model,
        model_hash=assembly.model_hash,
        block_size=assembly.layout.block_size,
        num_blocks=assembly.layout.num_blocks,
        max_model_len=assembly.max_model_len,
        pid=os.getpid(),
        process=process_name(),
        metrics_address=with_host(metrics_address, host),
        kv_form=assembly.announced_form,
        speaks=SPOKEN,
        engine=assembly.name,
        root=assembly.root[:MAX_TEXT],
        greedy=assembly.greedy,
        tasks=assembly.limits.tasks,
        dimension=assembly.limits.dimension,
        adapters=assembly.adapter_names,
        adapter_folders=assembly.adapter_folders,
        adapter_places=0 if assembly.adapters is None else assembly.adapters.places,
        tls=runtime.keys.cluster is not None and runtime.keys.cluster.tls is not None,
    )


def announce_ready(record: WorkerRecord) -> None:
    """Tells whoever has started the process."""
    addresses = {"rpc": record.rpc_address, "stream": record.stream_address, "metrics": record.metrics_address}
    print_ready(f"{record.role}_worker", record.worker_id, addresses)
    log.info("ready", worker=record.worker_id, incarnation=record.incarnation, rpc=record.rpc_address)
