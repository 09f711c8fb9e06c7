"""Prometheus metrics of the workers of one process, on a port of their own (in the discovery record)."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.metrics_server import MetricsServer
from baton.security.bearer_keys import BearerKeys
from baton_proto.discovery import WorkerLoad

STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
LABELS = ("worker_id",)
GAUGES = {  # fields of WorkerLoad
    "running": "Sequences in the running batch",
    "waiting": "Sequences that wait for blocks or budget",
    "blocks_used": "KV blocks referenced by a sequence or a lease",
    "blocks_cached": "KV blocks kept for reuse",
    "blocks_total": "KV blocks of the slab",
    "queued_prefill_tokens": "Prompt tokens not computed yet",
    "leases": "Leases on KV blocks, quarantined ones included",
}
COUNTERS = {
    "steps": "Engine steps",
    "tokens": "Tokens sampled",
    "requests": "Requests accepted",
    "failures": "Requests that ended in a failure",
    "transfers": "KV transfers that were committed",
    "transfer_failures": "KV transfers that were not committed",
    "transfer_bytes": "KV bytes of committed transfers",
}


class MetricsEndpoint:
    """What all workers of the process are counted in, and the HTTP server that shows it."""

    def __init__(self, keys: BearerKeys | None = None) -> None:
        self._registry = CollectorRegistry()
        server = MetricsServer(self._registry, keys)
        self.serve, self.close = server.serve, server.close

        def named(kind: Any, names: dict[str, str]) -> dict[str, Any]:
            return {
                name: kind(f"baton_worker_{name}", what, LABELS, registry=self._registry)
                for name, what in names.items()
            }

        self.gauges: dict[str, Gauge] = named(Gauge, GAUGES)
        self.counters: dict[str, Counter] = named(Counter, COUNTERS)
        self.step_seconds = Histogram(
            "baton_worker_step_seconds",
            "Duration of an engine step",
            LABELS,
            buckets=STEP_BUCKETS_S,
            registry=self._registry,
        )


class WorkerMetrics:
    """One worker's. Event loop only."""

    def __init__(self, endpoint: MetricsEndpoint, worker_id: str) -> None:
        self._counted_steps = 0
        self._shown = WorkerLoad()
        self._gauges = {name: gauge.labels(worker_id) for name, gauge in endpoint.gauges.items()}
        self._step_seconds = endpoint.step_seconds.labels(worker_id)
        counters = {name: counter.labels(worker_id) for name, counter in endpoint.counters.items()}
        self._steps = counters["steps"]
        self.tokens = counters["tokens"]
        self.requests = counters["requests"]
        self.failures = counters["failures"]
        self.transfers = counters["transfers"]
        self.transfer_failures = counters["transfer_failures"]
        self.transfer_bytes = counters["transfer_bytes"]

    def observe(self, load: WorkerLoad) -> None:
        for name, gauge in self._gauges.items():
            if (value := getattr(load, name)) != getattr(self._shown, name):  # setting takes a lock
                gauge.set(value)
        self._shown = load
        if load.steps > self._counted_steps:
            self._steps.inc(load.steps - self._counted_steps)
            self._step_seconds.observe(load.step_ms / 1000)
            self._counted_steps = load.steps
