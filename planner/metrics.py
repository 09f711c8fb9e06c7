"""The planner's Prometheus metrics, on their own port. All but NATS's are computed from the lines of the journal."""

from collections import Counter as CountOf

from prometheus_client import Counter, Gauge, Histogram

from baton_proto.planner import ALL_VERBS, ROLES, State
from planner.journal import Decided, EffectEnded, Line
from runtime.telemetry.metrics import ProcessMetrics

STATES: tuple[State, ...] = ("starting", "ready", "draining", "sleeping")
EFFECT_BUCKETS_S = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)


class PlannerMetrics(ProcessMetrics):
    def __init__(self) -> None:
        super().__init__()

        def gauge(name: str, what: str, *labels: str) -> Gauge:
            return Gauge(f"baton_planner_{name}", what, labels, registry=self.registry)

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"baton_planner_{name}", what, labels, registry=self.registry)

        self._wanted = gauge("workers_wanted", "Workers that the planner wants", "role")
        self._workers = gauge("workers", "Workers that it sees", "role", "state")
        self._frozen = gauge("frozen", "1 while nothing is changed because what is known is too old")
        self._decided = gauge("last_decision_timestamp_seconds", "Unix time of the last decision; 0 before the first")
        decisions = counter("decisions", "Decisions, by what came of them", "outcome")
        actions = counter("actions", "Effects that were decided", "verb")
        effects = counter("effects", "Effects that have ended", "verb", "outcome")
        self._decisions = {outcome: decisions.labels(outcome) for outcome in ("acted", "unchanged", "frozen")}
        self._actions = {verb: actions.labels(verb) for verb in ALL_VERBS}
        self._effects = {(verb, end): effects.labels(verb, end) for verb in ALL_VERBS for end in ("done", "failed")}
        durations = Histogram(
            "baton_planner_effect_duration_seconds",
            "How long effects took",
            ["verb"],
            buckets=EFFECT_BUCKETS_S,
            registry=self.registry,
        )
        self._effect_s = {verb: durations.labels(verb) for verb in ALL_VERBS}

    def observe(self, line: Line) -> None:
        if isinstance(line, Decided):
            self._observe_decision(line)
        elif isinstance(line, EffectEnded):
            self._effects[line.verb, "failed" if line.error else "done"].inc()
            self._effect_s[line.verb].observe(line.duration_s)

    def _observe_decision(self, line: Decided) -> None:
        target = line.target
        self._decided.set(line.time_s)
        self._frozen.set(target.frozen)
        for role, count in zip(ROLES, (target.prefill, target.decode), strict=True):
            self._wanted.labels(role).set(count)
        counts = CountOf((worker.role, worker.state) for worker in line.observation.workers)
        for role in ROLES:
            for state in STATES:
                self._workers.labels(role, state).set(counts[role, state])
        self._decisions["frozen" if target.frozen else "acted" if target.actions else "unchanged"].inc()
        for action in target.actions:
            self._actions[action.verb].inc()
