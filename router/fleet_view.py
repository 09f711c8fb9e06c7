"""What a router knows of the fleet: its workers, what they hold and have been charged, and the requests that wait."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from router.counters.metrics import RouterMetrics
from router.index.indexer import Indexer
from router.index.prefix_hits import PrefixHits
from router.parsing.families import MARKS
from router.placement.assignment import Assigner
from router.placement.expected_prefixes import ExpectedPrefixes
from router.requests.admission import AdmissionQueue
from router.requests.choice import Parts
from router.text.tokenizer import Tokenizer
from router.views.gauges import add_event_gauges, add_queue_gauges, add_sharing_gauges, add_worker_gauges
from router.views.status import StatusView
from router.workers.adapter_spread import AdapterSpread
from router.workers.charge_sharing import ChargeSharing
from router.workers.load import LoadLedger
from router.workers.pool import WorkerPool
from router.workers.step_speed import StepSpeeds
from router.workers.waking import Waking
from runtime.checkpoint.model_files import ModelFiles
from runtime.config.serving import ServingConfig
from runtime.discovery.directory import Change, Directory
from runtime.discovery.load_board import LoadBoard
from runtime.discovery.worker_key import WorkerKey
from runtime.nats.client import NatsClient
from runtime.security.keys import Keys


@dataclass(frozen=True, slots=True)
class FleetView:
    directory: Directory
    load_board: LoadBoard
    ledger: LoadLedger
    indexer: Indexer
    expected: ExpectedPrefixes
    speeds: StepSpeeds
    hits: PrefixHits
    sharing: ChargeSharing
    adapters: AdapterSpread
    parts: Parts


def fleet_view(
    config: ServingConfig,
    files: ModelFiles,
    router_id: str,
    nats: NatsClient,
    keys: Keys,
    metrics: RouterMetrics,
    waking: Waking,
) -> FleetView:
    """`config`, `nats`: of one model, whose namespace nobody else's workers are in."""
    queue, charged = AdmissionQueue(config.router.queue_limit), asyncio.Event()
    ledger = LoadLedger(
        config.engine.block_size,
        times=config.step_times,
        relieved=queue.wake,
        has_news=charged.set,
    )
    directory = Directory(nats)
    pool = WorkerPool(
        router_id,
        model_name(config, files),
        config.engine.block_size,
        ledger,
        keys.cluster,
        changed=queue.wake,
        load_seen=lambda worker, load: indexer.observe(worker, load),
        expected={worker.name: worker.worker_role for worker in config.external_workers},
        foreign=lambda: directory.foreign,
        until_asked=waking.until_asked,
    )
    adapters = AdapterSpread(pool)
    expected, hits = ExpectedPrefixes(), PrefixHits()
    indexer = Indexer(nats, pool.snapshot, expected.stored)
    parts = Parts(
        tokenizer=Tokenizer(files.folder, files.config.vocab_size, MARKS, config.router.parse_control_tokens),
        block_size=config.engine.block_size,
        config=config.router,
        pool=pool,
        assigner=Assigner(
            pool,
            indexer,
            ledger,
            config.router,
            expected=expected,
            hits=hits,
            targets=config.step_targets,
            crowded=adapters.crowded,
        ),
        queue=queue,
        metrics=metrics,
        waking=waking,
    )
    sharing = ChargeSharing(nats, ledger, charged, router_id)
    speeds = StepSpeeds(ledger, config.step_times, lambda worker: _server(directory, worker))
    return FleetView(directory, LoadBoard(nats), ledger, indexer, expected, speeds, hits, sharing, adapters, parts)


def _server(directory: Directory, worker: WorkerKey) -> str:
    """Ranks of one vLLM server have one process of ours. Empty: the worker is an engine of its own."""
    record = directory.workers.get(worker[0])
    return record.process if record is not None and record.engine == "external" else ""


async def follow_workers(view: FleetView, closing: AsyncExitStack) -> None:
    """Invariant: the pool hears of a worker before the indexer, because the indexer asks the pool for a snapshot."""
    pool = view.parts.pool

    def forget(change: Change) -> None:
        if change.kind == "removed":
            key = (change.record.worker_id, change.record.incarnation)
            view.load_board.discard(key[0])
            view.parts.metrics.forget(key)
            view.expected.forget(key)
            view.speeds.forget(key)

    view.directory.on_change(pool.apply)
    view.directory.on_change(view.indexer.apply)
    view.directory.on_change(forget)
    view.load_board.on_report(pool.load_report)
    view.load_board.on_report(view.speeds.load_report)
    view.load_board.on_report(view.indexer.load_report)  # the indexer also follows workers that the pool does not know
    closing.push_async_callback(pool.close)
    closing.push_async_callback(view.adapters.close)
    await view.indexer.start()
    closing.push_async_callback(view.indexer.close)
    await view.load_board.start()
    await view.sharing.start()
    closing.push_async_callback(view.sharing.close)
    await view.directory.start()
    closing.push_async_callback(view.directory.close)


def status_view(config: ServingConfig, router_id: str, view: FleetView) -> StatusView:
    """What the router says of its workers, in its metrics, too."""
    parts, metrics = view.parts, view.parts.metrics
    status = StatusView(router_id, parts.pool, view.ledger, view.indexer, parts.queue, metrics, view.directory.namesake)
    add_queue_gauges(metrics, parts.queue, config.planner.targets)
    add_worker_gauges(metrics, view.directory, parts.pool, status, view.speeds)
    add_event_gauges(metrics, view.indexer)
    add_sharing_gauges(metrics, view.sharing, view.expected)
    return status


def model_name(config: ServingConfig, files: ModelFiles) -> str:
    return config.served_model_name or files.name
