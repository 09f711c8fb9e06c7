"""The router's Prometheus metrics, in a registry of their own. Gauges ask when they are scraped."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

LATENCY_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
INTERVAL_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0)


class _Borrowed(Collector):
    """A counter whose value is read at each scrape."""

    def __init__(self, name: str, what: str, read: Callable[[], float]) -> None:
        self._name, self._what, self._read = name, what, read

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._what, value=self._read())


class _PerWorker(Collector):
    """A gauge with a value per worker, for those that are named at each scrape."""

    def __init__(self, name: str, what: str, read: Callable[[], Mapping[str, float]]) -> None:
        self._name, self._what, self._read = name, what, read

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(self._name, self._what, labels=["worker"])
        for worker_id, value in self._read().items():
            family.add_metric([worker_id], value)
        yield family


class RouterMetrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"baton_router_{name}", what, labels, registry=registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"baton_router_{name}", what, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests that have ended", "outcome")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of ended requests")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens that no worker had to compute")
        self.output_tokens = counter("output_tokens", "Output tokens of ended requests")
        self.placements = counter("placements", "Attempts, by where the prompt runs and why", "reason")
        self.failovers = counter("failovers", "Attempts that lost a worker")
        self.ttft_s = histogram("ttft_seconds", "Arrival to the first token, of each choice", LATENCY_BUCKETS_S)
        self.itl_s = histogram("itl_seconds", "Time per output token after the first piece", INTERVAL_BUCKETS_S)
        self.duration_s = histogram("request_seconds", "Arrival to the end, of each request", LATENCY_BUCKETS_S)

    def request_ended(
        self, outcome: str, prompt_tokens: int, output_tokens: int, cached_tokens: int, duration_s: float
    ) -> None:
        self.requests.labels(outcome=outcome).inc()
        self.prompt_tokens.inc(prompt_tokens)
        self.output_tokens.inc(output_tokens)
        self.cached_tokens.inc(cached_tokens)
        self.duration_s.observe(duration_s)

    def gauge(self, name: str, what: str, read: Callable[[], float]) -> None:
        """Adds a gauge whose value is read at each scrape."""
        Gauge(f"baton_router_{name}", what, registry=self.registry).set_function(read)

    def count(self, name: str, what: str, read: Callable[[], float]) -> None:
        """Adds a counter that somebody else keeps."""
        self.registry.register(_Borrowed(f"baton_router_{name}", what, read))

    def per_worker(self, name: str, what: str, read: Callable[[], Mapping[str, float]]) -> None:
        """Adds a gauge with a value for each worker that `read` names at a scrape."""
        self.registry.register(_PerWorker(f"baton_router_{name}", what, read))

    def exposition(self) -> bytes:
        """What a scrape gets, in Prometheus' text format."""
        return generate_latest(self.registry)
