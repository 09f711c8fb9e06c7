"""What the Prometheus metrics of all processes have in common. Each process has its own registry. Values that some
object keeps anyway are read at each scrape and cost nothing in between."""

import platform
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from runtime.code_version import code_version
from runtime.nats.client import NatsClient
from runtime.security.keys import NO_KEYS, Keys
from runtime.telemetry.metrics_server import MetricsServer

Samples = Iterable[tuple[Sequence[str], float]]
"""Pairs of label values and a value."""

Read = Callable[[], float | Samples]
"""Returns one value, or one for each combination of labels."""


class AtScrape(Collector):
    """A metric whose value another object keeps. A thread of the endpoint may call `read`."""

    def __init__(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        what: str,
        read: Read,
        labels: Sequence[str] = (),
    ) -> None:
        self._family, self._name, self._what = family, name, what
        self._read = read
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        family = self._family(self._name, self._what, labels=self._labels)
        read = self._read()
        for values, value in [((), read)] if isinstance(read, int | float) else read:
            family.add_metric(values, value)
        yield family


class Distribution(Collector):
    """A histogram that one thread writes. Because it takes no locks, an observation costs a fifth of the library's."""

    def __init__(self, name: str, what: str, buckets: Sequence[float]) -> None:
        """`buckets`: their upper bounds, ascending."""
        self._name, self._what = name, what
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, amount: float) -> None:
        self._counts[bisect_left(self._bounds, amount)] += 1
        self._sum += amount

    def collect(self) -> Iterable[Metric]:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        family = HistogramMetricFamily(self._name, self._what)
        family.add_metric([], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        yield family


class ProcessMetrics:
    """The registry of one process, with the metrics of the process itself."""

    def __init__(self, of_process: bool = True) -> None:
        """`of_process` False: another registry has the metrics of the process itself."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._server: MetricsServer | None = None
        if not of_process:
            return
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        build = Info("baton_build", "What runs here", registry=self.registry)
        build.info({"version": code_version(), "python": platform.python_version()})

    def gauge(self, name: str, what: str, read: Read, *labels: str) -> None:
        """`read` is called at each scrape."""
        self.registry.register(AtScrape(GaugeMetricFamily, name, what, read, labels))

    def counter(self, name: str, what: str, read: Read, *labels: str) -> None:
        """`read` is called at each scrape."""
        self.registry.register(AtScrape(CounterMetricFamily, name, what, read, labels))

    def distribution(self, name: str, what: str, buckets: Sequence[float]) -> Distribution:
        """The distribution of what one thread observes."""
        distribution = Distribution(name, what, buckets)
        self.registry.register(distribution)
        return distribution

    def watch(self, nats: NatsClient) -> None:
        """Shows this process's connection to NATS, which has no Prometheus metrics of its own."""
        self.gauge("baton_nats_connected", "1 while this process is connected to NATS", lambda: nats.connected)
        self.counter(
            "baton_nats_disconnects", "How often this process has lost its connection to NATS", lambda: nats.disconnects
        )

    def serve(self, host: str, keys: Keys = NO_KEYS) -> str:
        """Serves the metrics on a free port, for processes without an HTTP API. A scraper has to show an API key, where
        there are any. Returns HOST:PORT. Raises OSError."""
        self._server = MetricsServer(self.registry, keys.api, None if keys.cluster is None else keys.cluster.tls)
        return self._server.serve(host)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
