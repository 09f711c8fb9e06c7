"""Prometheus metrics of one worker, on its own port (in the discovery record)."""

from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from baton_proto.discovery import WorkerLoad

STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class WorkerMetrics:
    """Event loop only, but for the scrape itself."""

    def __init__(self, worker_id: str) -> None:
        registry = CollectorRegistry()
        labels = {"worker_id": worker_id}

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"baton_worker_{name}", what, list(labels), registry=registry).labels(**labels)

        def counter(name: str, what: str) -> Counter:
            return Counter(f"baton_worker_{name}", what, list(labels), registry=registry).labels(**labels)

        self._registry = registry
        self._server: WSGIServer | None = None
        self._counted_steps = 0
        self._steps = counter("steps", "Engine steps")
        self._step_seconds = Histogram(
            "baton_worker_step_seconds",
            "Duration of an engine step",
            list(labels),
            buckets=STEP_BUCKETS_S,
            registry=registry,
        ).labels(**labels)
        self._gauges = {
            "running": gauge("running", "Sequences in the running batch"),
            "waiting": gauge("waiting", "Sequences that wait for blocks or budget"),
            "blocks_used": gauge("blocks_used", "KV blocks referenced by a sequence or a lease"),
            "blocks_cached": gauge("blocks_cached", "KV blocks kept for reuse"),
            "blocks_total": gauge("blocks_total", "KV blocks of the slab"),
            "queued_prefill_tokens": gauge("queued_prefill_tokens", "Prompt tokens not computed yet"),
            "leases": gauge("leases", "Leases on KV blocks, quarantined ones included"),
        }
        self.tokens = counter("tokens", "Tokens sampled")
        self.requests = counter("requests", "Requests accepted")
        self.failures = counter("failures", "Requests that ended in a failure")
        self.transfers = counter("transfers", "KV transfers that were committed")
        self.transfer_failures = counter("transfer_failures", "KV transfers that were not committed")
        self.transfer_bytes = counter("transfer_bytes", "KV bytes of committed transfers")

    def observe(self, load: WorkerLoad) -> None:
        for name, gauge in self._gauges.items():
            gauge.set(getattr(load, name))
        if load.steps > self._counted_steps:
            self._steps.inc(load.steps - self._counted_steps)
            self._step_seconds.observe(load.step_ms / 1000)
            self._counted_steps = load.steps

    def serve(self, host: str) -> str:
        """Returns HOST:PORT of the endpoint."""
        self._server, _ = start_http_server(0, addr=host, registry=self._registry)
        return f"{host}:{self._server.server_port}"

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
