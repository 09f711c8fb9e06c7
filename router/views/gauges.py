"""The router's metrics that are read at a scrape: its queue, its view of the workers, and their events."""

from collections import Counter

from router.counters.metrics import RouterMetrics
from router.index.indexer import Indexer
from router.placement.expected_prefixes import ExpectedPrefixes
from router.requests.admission import AdmissionQueue
from router.views.status import StatusView
from router.workers.charge_sharing import ChargeSharing
from router.workers.pool import PooledWorker, WorkerPool
from router.workers.step_speed import StepSpeeds
from runtime.config.planner import TargetsConfig
from runtime.discovery.directory import Directory
from runtime.telemetry.metrics import Read, Samples

ROLES = ("prefill", "decode")
STATES = ("ready", "draining", "sleeping", "unusable")


def add_queue_gauges(metrics: RouterMetrics, queue: AdmissionQueue, targets: TargetsConfig) -> None:
    gauge = metrics.gauge
    gauge("baton_router_queue_waiting", "Choices that wait for workers", lambda: queue.view().waiting)
    gauge("baton_router_queue_running", "Choices that run on workers", lambda: queue.view().running)
    gauge("baton_router_queue_limit", "Requests that may be admitted at once", lambda: queue.view().capacity)
    gauge("baton_router_queue_oldest_age_seconds", "Age of the oldest that waits", lambda: queue.view().oldest_age_s)
    gauge(
        "baton_router_ttft_target_seconds", "What is aimed at: planner.targets.ttft_ms", lambda: targets.ttft_ms / 1000
    )
    gauge("baton_router_itl_target_seconds", "What is aimed at: planner.targets.itl_ms", lambda: targets.itl_ms / 1000)


def add_worker_gauges(
    metrics: RouterMetrics, directory: Directory, pool: WorkerPool, status: StatusView, speeds: StepSpeeds
) -> None:
    metrics.gauge(
        "baton_router_workers",
        "Workers in discovery; unusable: ready, but not reachable or of another model",
        lambda: _workers(pool),
        "role",
        "state",
    )
    metrics.counter("baton_router_workers_lost", "Workers that went without a word", lambda: directory.lost)
    metrics.gauge(
        "baton_router_workers_with_trouble",
        "Workers that status has a note on, such as missing events",
        lambda: sum(1 for worker in pool.workers.values() if status.note(worker)),
    )
    metrics.gauge(
        "baton_router_worker_slowness",
        "How long a worker's steps take, as a multiple of the profile's: 2 is half as fast",
        speeds.slowness,
        "worker",
    )


def add_event_gauges(metrics: RouterMetrics, indexer: Indexer) -> None:
    def each(field: str) -> Read:
        return lambda: [((worker.key[0],), getattr(worker, field)) for worker in indexer.workers]

    metrics.gauge("baton_router_tree_blocks", "Distinct blocks in the radix tree", lambda: indexer.tree.num_blocks)
    metrics.counter("baton_router_event_snapshots", "Block tables taken from workers", lambda: indexer.snapshots)
    metrics.counter("baton_router_events_malformed", "Batches that could not be read", lambda: indexer.malformed_events)
    metrics.counter("baton_router_events_refused", "Events that contradict the tree", lambda: indexer.refused_events)
    metrics.counter("baton_router_event_batches", "Batches of KV events applied", each("batches"), "worker")
    metrics.gauge(
        "baton_router_event_lag_batches",
        "Batches that a worker has published and the tree does not contain yet",
        each("lag"),
        "worker",
    )
    metrics.counter("baton_router_event_gaps", "Holes in a worker's event numbers", each("gaps"), "worker")
    metrics.gauge(
        "baton_router_worker_without_events",
        "1 for a worker that caches blocks and publishes no events: it is chosen by load alone",
        each("silent"),
        "worker",
    )


def add_sharing_gauges(metrics: RouterMetrics, sharing: ChargeSharing, expected: ExpectedPrefixes) -> None:
    others = sharing.others
    metrics.gauge("baton_router_other_routers", "Routers that tell what they charge", lambda: len(others.routers))
    metrics.gauge("baton_router_expected_prefixes", "Prompts whose events are awaited", lambda: expected.count)
    metrics.counter("baton_router_charges_malformed", "Charge reports unread", lambda: sharing.malformed_reports)


def _workers(pool: WorkerPool) -> Samples:
    counts = Counter((worker.record.role, shown_state(worker)) for worker in pool.workers.values())
    return [((role, state), counts[role, state]) for role in ROLES for state in STATES]


def shown_state(worker: PooledWorker) -> str:
    """One of STATES."""
    if worker.usable:
        return "ready"
    return worker.record.state if worker.record.state != "ready" else "unusable"
