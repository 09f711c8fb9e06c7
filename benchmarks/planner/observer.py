"""The observer of the simulated cluster, in the place of planner/observing/live_observer.py."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from baton_proto.planner import (
    DECODE,
    MAJOR,
    PREFILL,
    SOURCES,
    Interval,
    LoadSample,
    Observation,
    Queue,
    StepSample,
    WorkerView,
)
from benchmarks.planner.fleet import Fleet, Worker
from benchmarks.planner.serving import ServingCluster, Totals, percentile_ms
from runtime.config.step_times import token_pairs
from simulator.compiled import Ints

SAMPLE_S = 1.0  # between two samples of the load
WAITING_WEIGHT = 0.02  # of a waiting request in the KV load
NOISE = 0.03  # relative, of a timed step


@dataclass(frozen=True, slots=True)
class Marks:
    """The counters at the last observation."""

    time_s: float
    totals: Totals
    ttft: Ints
    itl: Ints


class FleetObserver:
    def __init__(self, fleet: Fleet, cluster: ServingCluster, gpus: int, clock: Callable[[], float], seed: int) -> None:
        self._fleet = fleet
        self._cluster = cluster
        self._gpus = gpus
        self._clock = clock
        self._dice = np.random.default_rng(seed)
        self._seen = self._marks()
        self._samples: list[LoadSample] = []
        self._steps: list[StepSample] = []

    def sample(self) -> None:
        """Samples the load and the engine steps; to be called every SAMPLE_S."""
        self._fleet.advance()
        serving = [worker for worker in self._fleet.workers.values() if worker.state == "ready"]
        decoders = [worker for worker in serving if worker.role == DECODE]
        waiting = len(self._cluster.waiting())
        used = [self._cluster.kv_used(worker.slot) for worker in decoders]
        # If a prefill worker is idle, the queue waits for room on decode workers, and each is charged with its share.
        idle = any(worker.role == PREFILL and self._cluster.idle(worker.slot) for worker in serving)
        kv_load = float(np.mean(used)) + WAITING_WEIGHT * (waiting / len(decoders) if idle else 0) if decoders else 0.0
        self._steps += [step for worker in serving if (step := self._step(worker)) is not None]
        self._samples.append(LoadSample(waiting, kv_load, len(serving) - len(decoders), len(decoders)))

    async def __call__(self) -> Observation:
        self._fleet.advance()
        waiting, requests = self._cluster.waiting(), self._cluster.requests
        queue = Queue(
            len(waiting),
            int(requests.uncached[waiting.start : waiting.stop].sum()),
            float(self._cluster.now_s - requests.arrival_s[waiting.start]) if waiting else 0.0,
        )
        interval, views = self._interval(), [self._view(worker) for worker in self._fleet.workers.values()]
        steps, self._steps = self._steps, []
        ages_s = dict.fromkeys(SOURCES, 0.0)
        return Observation(MAJOR, self._clock(), self._gpus, views, queue, interval, steps, ages_s=ages_s)

    def _interval(self) -> Interval:
        """The interval since the last call."""
        before, now, requests = self._seen, self._marks(), self._cluster.requests
        samples, self._seen, self._samples = self._samples, now, []
        arrived = slice(before.totals.arrived, now.totals.arrived)
        prompt = requests.prompt[arrived]
        ttft, itl = now.ttft - before.ttft, now.itl - before.itl
        return Interval(
            duration_s=max(1e-3, now.time_s - before.time_s),
            arrivals=len(prompt),
            input_tokens=int(prompt.sum()),
            input_tokens_squared=float((prompt.astype(np.float64) ** 2).sum()),
            cached_tokens=int((prompt - requests.uncached[arrived]).sum()),
            finished=now.totals.finished - before.totals.finished,
            output_tokens=now.totals.output_tokens - before.totals.output_tokens,
            ttft_p50_ms=percentile_ms(ttft, 0.5),
            ttft_p90_ms=percentile_ms(ttft, 0.9),
            itl_p50_ms=percentile_ms(itl, 0.5),
            itl_p90_ms=percentile_ms(itl, 0.9),
            samples=samples,
        )

    def _view(self, worker: Worker) -> WorkerView:
        cluster = self._cluster
        running, context = cluster.decoding(worker.slot)
        return WorkerView(
            worker.worker_id,
            worker.role,
            worker.state,
            worker.since_s,
            worker.ready_since_s,
            running=running,
            max_running=cluster.hardware.max_running,
            kv_used=min(1.0, cluster.kv_used(worker.slot)),
            kv_tokens=cluster.hardware.kv_tokens,
            context_tokens=int(context),
        )

    def _step(self, worker: Worker) -> StepSample | None:
        """The step that the worker runs now, timed with noise; None when it is idle or was never ready."""
        if worker.ready_since_s is None:
            return None
        engine, requests, slot = self._cluster.hardware.engine, self._cluster.requests, worker.slot
        ready_for_s = self._clock() - worker.ready_since_s
        factor = float(np.exp(self._dice.normal(0.0, NOISE)))
        batch, context = self._cluster.decoding(slot)
        if batch:
            step_ms = engine.decode_ms(batch, context) * factor
            return StepSample(worker.worker_id, ready_for_s, 0, 0, batch, context, step_ms)
        request = self._cluster.prompt_of(slot)
        if request is None:
            return None
        tokens, prompt = int(requests.uncached[request]), int(requests.prompt[request])
        pairs = token_pairs(prompt - tokens, tokens)
        step_ms = engine.prefill_ms(tokens, pairs) * factor
        return StepSample(worker.worker_id, ready_for_s, tokens, pairs, 0, 0, step_ms)

    def _marks(self) -> Marks:
        cluster = self._cluster
        return Marks(cluster.now_s, cluster.totals(), cluster.state.ttft.copy(), cluster.state.itl.copy())
