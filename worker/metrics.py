"""Prometheus metrics of the workers of one process, on a port that their discovery records name."""

from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter

from prometheus_client import Histogram

from baton_proto.discovery import WorkerLoad
from engine.interface import Counts, Engine
from runtime.kv_events.publisher import EventPublisher
from runtime.telemetry.metrics import ProcessMetrics, Samples

STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
TRANSFER_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
STATES = ("ready", "draining", "sleeping")
LABELS = ("worker", "role")


class WorkerMetrics:
    """The metrics of one worker. The event loop writes them as plain numbers, because setting a Prometheus metric takes
    locks; the endpoint's threads read them."""

    def __init__(
        self, endpoint: "MetricsEndpoint", worker_id: str, role: str, engine: Engine, publisher: EventPublisher
    ) -> None:
        self.labels = (worker_id, role)
        self.load = WorkerLoad()
        self.leases: Callable[[], int] = lambda: 0  # set when there is a role
        self.state = STATES[0]
        self.requests = 0
        self.failures = 0
        self.output_tokens = 0
        self.transfers: Counter[str] = Counter()  # by transport
        self.transfer_bytes: Counter[str] = Counter()
        self.transfer_failures = 0
        self.engine = engine
        self.publisher = publisher
        self._counted_steps = 0
        self._step_s = endpoint.step_s.labels(*self.labels)
        self._transfer_s = endpoint.transfer_s
        endpoint.workers.append(self)

    @property
    def counts(self) -> Counts:
        return self.engine.counts()

    @property
    def num_leases(self) -> int:
        return self.leases()

    def observe(self, load: WorkerLoad, step_ms: Sequence[float] = ()) -> None:
        """Takes the load after a step, or with a report. step_ms: of the steps since the last load; without them the
        load has the last one's."""
        self.load = load
        if load.steps > self._counted_steps:
            self._counted_steps = load.steps
            for duration_ms in step_ms or (load.step_ms,):
                self._step_s.observe(duration_ms / 1000)

    def received(self, transport: str, kv_bytes: int) -> None:
        """A transfer was committed."""
        self.transfers[transport] += 1
        self.transfer_bytes[transport] += kv_bytes

    def sent(self, transport: str, kv_bytes: int, seconds: float) -> None:
        self.received(transport, kv_bytes)
        self._transfer_s.labels(*self.labels).observe(seconds)


GAUGES = {  # name -> (what it is, where WorkerMetrics has it)
    "requests_running": ("Sequences in the running batch", "load.running"),
    "requests_waiting": ("Sequences that wait for blocks or budget", "load.waiting"),
    "queued_prefill_tokens": ("Prompt tokens not computed yet", "load.queued_prefill_tokens"),
    "kv_blocks_used": ("KV blocks referenced by a sequence or a lease", "load.blocks_used"),
    "kv_blocks_cached": ("KV blocks kept for reuse", "load.blocks_cached"),
    "kv_blocks_capacity": ("KV blocks of the slab", "load.blocks_total"),
    "kv_host_blocks": ("KV blocks in the host tier", "load.host_blocks_used"),
    "kv_blocks_kept": ("KV blocks that requests asked to keep", "counts.blocks_kept"),
    "kv_host_blocks_capacity": ("KV blocks that the host tier has room for", "load.host_blocks_total"),
    "kv_disk_blocks": ("KV blocks with a copy in the disk tier", "load.disk_blocks_used"),
    "kv_disk_blocks_capacity": ("KV blocks that the disk tier has room for", "load.disk_blocks_total"),
    "leases": ("Leases on KV blocks, quarantined ones included", "num_leases"),
    "event_batches_unacknowledged": (
        "Batches of KV events that JetStream has not confirmed",
        "publisher.unacknowledged",
    ),
}
COUNTERS = {
    "requests": ("Requests accepted", "requests"),
    "request_failures": ("Requests that ended in a failure", "failures"),
    "prompt_tokens": ("Prompt tokens computed", "counts.prompt_tokens"),
    "output_tokens": ("Output tokens, of prompts run elsewhere the first one too", "output_tokens"),
    "preemptions": ("Sequences that had to give their blocks to others", "counts.preemptions"),
    "drafted_tokens": ("Output tokens guessed before they were computed", "counts.drafted_tokens"),
    "accepted_tokens": ("Output tokens guessed right", "counts.accepted_tokens"),
    "kv_blocks_restored": (
        "KV blocks copied back from the host tier instead of being computed",
        "counts.blocks_restored",
    ),
    "kv_blocks_lowered": ("KV blocks copied to the host tier instead of being forgotten", "counts.blocks_lowered"),
    "kv_blocks_read": ("KV blocks read from the disk tier into the host tier", "counts.blocks_read"),
    "kv_disk_errors": ("Reads and writes of the disk tier that failed, or found a damaged block", "counts.disk_errors"),
    "prefix_collisions": (
        "Looks into the prefix cache that found other tokens under a prefix's hash",
        "counts.prefix_collisions",
    ),
    "transfer_failures": ("KV transfers that were not committed", "transfer_failures"),
    "event_batches_published": ("Batches of KV events for the routers", "publisher.last_event_id"),
    "event_batches_dropped": (
        "Those of them that were given up, since NATS was away for too long",
        "publisher.dropped_batches",
    ),
}


class MetricsEndpoint(ProcessMetrics):
    """Shows all workers of the process."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: list[WorkerMetrics] = []
        for name, (what, where) in GAUGES.items():
            self.gauge(f"baton_worker_{name}", what, self._of_each(where), *LABELS)
        for name, (what, where) in COUNTERS.items():
            self.counter(f"baton_worker_{name}", what, self._of_each(where), *LABELS)
        self.gauge("baton_worker_state", "1 for the state that the worker is in", self._states, *LABELS, "state")
        for name, what in (
            ("transfers", "KV transfers that were committed"),
            ("transfer_bytes", "KV bytes of committed transfers"),
        ):
            self.counter(f"baton_worker_{name}", what, self._by_transport(name), *LABELS, "transport")
        self.step_s = Histogram(
            "baton_worker_step_duration_seconds",
            "Duration of an engine step",
            LABELS,
            buckets=STEP_BUCKETS_S,
            registry=self.registry,
        )
        self.transfer_s = Histogram(
            "baton_worker_transfer_duration_seconds",
            "From a prompt's arrival on the prefill worker to the commit of its KV, waiting and computing included",
            LABELS,
            buckets=TRANSFER_BUCKETS_S,
            registry=self.registry,
        )

    def _of_each(self, where: str) -> Callable[[], Samples]:
        value = attrgetter(where)
        return lambda: [(worker.labels, value(worker)) for worker in self.workers]

    def _states(self) -> Samples:
        for worker in self.workers:
            for state in STATES:
                yield (*worker.labels, state), worker.state == state

    def _by_transport(self, name: str) -> Callable[[], Samples]:
        return lambda: [
            ((*worker.labels, transport), count)
            for worker in self.workers
            for transport, count in list(getattr(worker, name).items())
        ]
