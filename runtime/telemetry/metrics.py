"""What the Prometheus metrics of all processes have in common. Each has a registry of its own; what is known anyway is
read when it is scraped and costs nothing before.
"""

import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.nats.client import NatsClient
from runtime.security.bearer_keys import BearerKeys
from runtime.telemetry.metrics_server import MetricsServer

Samples = Iterable[tuple[Sequence[str], float]]
"""Values of the labels, value."""

Read = Callable[[], float | Samples]
"""One value, or one for each combination of labels."""


class AtScrape(Collector):
    """A metric that somebody else keeps. `read` may be called in a thread of the endpoint's."""

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


class ProcessMetrics:
    """The registry of one process, with what is known of the process itself."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        build = Info("baton_build", "What runs here", registry=self.registry)
        build.info({"version": _version(), "python": platform.python_version()})
        self._server: MetricsServer | None = None

    def gauge(self, name: str, what: str, read: Read, *labels: str) -> None:
        """Read at each scrape."""
        self.registry.register(AtScrape(GaugeMetricFamily, name, what, read, labels))

    def counter(self, name: str, what: str, read: Read, *labels: str) -> None:
        """Read at each scrape."""
        self.registry.register(AtScrape(CounterMetricFamily, name, what, read, labels))

    def watch(self, nats: NatsClient) -> None:
        """NATS has no metrics of its own in Prometheus' format: each process tells how it sees it."""
        self.gauge("baton_nats_connected", "1 while this process is connected to NATS", lambda: nats.connected)
        self.counter(
            "baton_nats_disconnects", "How often this process has lost its connection to NATS", lambda: nats.disconnects
        )

    def serve(self, host: str, keys: BearerKeys | None = None) -> str:
        """On a free port, for processes without an HTTP API; `keys`: who asks has to show one of them. Returns
        HOST:PORT. Raises OSError."""
        self._server = MetricsServer(self.registry, keys)
        return self._server.serve(host)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def _version() -> str:
    try:
        return importlib.metadata.version("baton-serve")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "unknown"
