"""The planner's Prometheus metrics, all from the lines of its journal, on a port of their own."""

import time
from collections import Counter as CountOf

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.metrics_server import MetricsServer
from baton.security.bearer_keys import BearerKeys
from baton_proto.planner import ROLES, State
from planner.journal import Decided, EffectEnded, Line

STATES: tuple[State, ...] = ("starting", "ready", "draining", "sleeping")
EFFECT_BUCKETS_S = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)


class PlannerMetrics:
    def __init__(self, keys: BearerKeys | None = None) -> None:
        registry = CollectorRegistry()
        server = MetricsServer(registry, keys)
        self.serve, self.close = server.serve, server.close
        self._decided_s: float | None = None

        def gauge(name: str, what: str, *labels: str) -> Gauge:
            return Gauge(f"baton_planner_{name}", what, labels, registry=registry)

        self._wanted = gauge("workers_wanted", "Workers that the planner wants", "role")
        self._workers = gauge("workers", "Workers that it sees", "role", "state")
        self._frozen = gauge("frozen", "1 while nothing is changed because what is known is too old")
        self._age = gauge("decision_age_seconds", "Since the last decision; -1 before the first")
        self._age.set_function(lambda: -1 if self._decided_s is None else time.time() - self._decided_s)
        self._decisions = Counter(
            "baton_planner_decisions", "Decisions, by what came of them", ["outcome"], registry=registry
        )
        self._actions = Counter("baton_planner_actions", "Effects that were decided", ["verb"], registry=registry)
        self._effects = Counter(
            "baton_planner_effects", "Effects that have ended", ["verb", "outcome"], registry=registry
        )
        self._effect_s = Histogram(
            "baton_planner_effect_seconds",
            "How long effects took",
            ["verb"],
            buckets=EFFECT_BUCKETS_S,
            registry=registry,
        )

    def observe(self, line: Line) -> None:
        if isinstance(line, Decided):
            self._decided(line)
        elif isinstance(line, EffectEnded):
            self._effects.labels(line.verb, "failed" if line.error else "done").inc()
            self._effect_s.labels(line.verb).observe(line.duration_s)

    def _decided(self, line: Decided) -> None:
        target = line.target
        self._decided_s = line.time_s
        self._frozen.set(target.frozen)
        for role, count in zip(ROLES, (target.prefill, target.decode), strict=True):
            self._wanted.labels(role).set(count)
        counts = CountOf((worker.role, worker.state) for worker in line.observation.workers)
        for role in ROLES:
            for state in STATES:
                self._workers.labels(role, state).set(counts[role, state])
        outcome = "frozen" if target.frozen else "acted" if target.actions else "unchanged"
        self._decisions.labels(outcome).inc()
        for action in target.actions:
            self._actions.labels(action.verb).inc()
