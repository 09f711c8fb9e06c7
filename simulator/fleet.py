"""The simulated workers: a Connector whose verbs take simulated time, and the observer that reads the cluster."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from baton_proto.planner import (
    ALL_VERBS,
    DECODE,
    MAJOR,
    PREFILL,
    SOURCES,
    Interval,
    LoadSample,
    Observation,
    Queue,
    Role,
    State,
    StepSample,
    Verb,
    WorkerView,
)
from simulator.serving import ServingCluster, percentile_ms

POLL_S = 0.5  # how often a draining worker is looked at
SAMPLE_S = 1.0  # between two samples of the load
WAITING_WEIGHT = 0.02  # of a waiting request in the KV load
NOISE = 0.03  # relative, of a timed step


@dataclass(frozen=True, slots=True)
class Delays:
    start_s: float = 60.0
    wake_s: float = 2.0
    flip_s: float = 5.0  # after it has drained


@dataclass(slots=True)
class Worker:
    worker_id: str
    role: Role
    slot: int
    state: State
    since_s: float
    ready_since_s: float | None = None


class Fleet:
    """Workers named in `stuck` never become ready."""

    def __init__(
        self, cluster: ServingCluster, gpus: int, delays: Delays, clock: Callable[[], float], seed: int
    ) -> None:
        self.verbs: tuple[Verb, ...] = ALL_VERBS
        self.workers: dict[str, Worker] = {}
        self.stuck: set[str] = set()
        self.gpu_s = 0.0  # held so far
        self.most_gpus = 0
        self._cluster = cluster
        self._gpus = gpus
        self._delays = delays
        self._clock = clock
        self._free = list(range(gpus))[::-1]
        self._changed_s = 0.0
        self._dice = np.random.default_rng(seed)
        self._seen = self._marks()
        self._samples: list[LoadSample] = []
        self._steps: list[StepSample] = []

    # --- Connector

    async def add(self, worker_id: str, role: Role) -> None:
        worker = self._start(worker_id, role)
        await asyncio.sleep(self._delays.start_s)
        while worker_id in self.stuck:
            await asyncio.sleep(self._delays.start_s)
        if worker.state == "starting":
            self._serve(worker)

    async def remove(self, worker_id: str) -> None:
        if worker_id in self.workers:
            self._end(self.workers[worker_id])

    async def drain(self, worker_id: str) -> None:
        if worker_id in self.workers:
            await self._emptied(self.workers[worker_id])
            self._end(self.workers[worker_id])

    async def sleep(self, worker_id: str) -> None:
        await self._emptied(self.workers[worker_id])
        self._enter(self.workers[worker_id], "sleeping")

    async def wake(self, worker_id: str) -> None:
        await asyncio.sleep(self._delays.wake_s)
        self._serve(self.workers[worker_id])

    async def flip(self, worker_id: str, role: Role) -> None:
        worker = self.workers[worker_id]
        await self._emptied(worker)
        await asyncio.sleep(self._delays.flip_s)
        worker.role = role
        self._serve(worker)

    def serve_now(self, worker_id: str, role: Role) -> None:
        """Without a delay: what stands when the day begins, and the oracle's."""
        self._serve(self._start(worker_id, role))

    # --- Observer

    def sample(self) -> None:
        """To be called every SAMPLE_S."""
        self._advance()
        serving = [worker for worker in self.workers.values() if worker.state == "ready"]
        decoders = [worker for worker in serving if worker.role == DECODE]
        waiting = len(self._cluster.waiting())
        used = [self._cluster.d_reserved[worker.slot] / self._cluster.hardware.kv_tokens for worker in decoders]
        # What finds no room on any decode worker waits in the queue: each has its part of it, once nobody prefills.
        idle = any(worker.role == PREFILL and self._cluster.idle(worker.slot) for worker in serving)
        kv_load = float(np.mean(used)) + WAITING_WEIGHT * (waiting / len(decoders) if idle else 0) if decoders else 0.0
        self._steps += [step for worker in serving if (step := self._step(worker)) is not None]
        self._samples.append(LoadSample(waiting, kv_load, len(serving) - len(decoders), len(decoders)))

    async def observe(self) -> Observation:
        self._advance()
        before, self._seen = self._seen, self._marks()
        samples, self._samples = self._samples, []
        requests, now_s = self._cluster.requests, self._cluster.now_s
        arrived = slice(before.arrived, self._seen.arrived)
        prompt = requests.prompt[arrived]
        waiting = self._cluster.waiting()
        ttft, itl = self._seen.ttft - before.ttft, self._seen.itl - before.itl
        interval = Interval(
            duration_s=max(1e-3, self._seen.time_s - before.time_s),
            arrivals=len(prompt),
            input_tokens=int(prompt.sum()),
            input_tokens_squared=float((prompt.astype(np.float64) ** 2).sum()),
            cached_tokens=int((prompt - requests.uncached[arrived]).sum()),
            finished=self._seen.finished - before.finished,
            output_tokens=self._seen.output_tokens - before.output_tokens,
            ttft_p50_ms=percentile_ms(ttft, 0.5),
            ttft_p90_ms=percentile_ms(ttft, 0.9),
            itl_p50_ms=percentile_ms(itl, 0.5),
            itl_p90_ms=percentile_ms(itl, 0.9),
            samples=samples,
        )
        queue = Queue(
            len(waiting),
            int(requests.uncached[waiting.start : waiting.stop].sum()),
            float(now_s - requests.arrival_s[waiting.start]) if waiting else 0.0,
        )
        views = [self._view(worker) for worker in self.workers.values()]
        steps, self._steps = self._steps, []
        ages_s = dict.fromkeys(SOURCES, 0.0)
        return Observation(MAJOR, self._clock(), self._gpus, views, queue, interval, steps, ages_s=ages_s)

    def _view(self, worker: Worker) -> WorkerView:
        slot, cluster = worker.slot, self._cluster
        return WorkerView(
            worker.worker_id,
            worker.role,
            worker.state,
            worker.since_s,
            worker.ready_since_s,
            running=int(cluster.d_batch[slot]),
            max_running=cluster.hardware.max_running,
            kv_used=min(1.0, float(cluster.d_reserved[slot] / cluster.hardware.kv_tokens)),
            kv_tokens=cluster.hardware.kv_tokens,
            context_tokens=int(cluster.d_context[slot]),
        )

    def _step(self, worker: Worker) -> StepSample | None:
        """The one that it is in."""
        if worker.ready_since_s is None:
            return None
        engine, requests, slot = self._cluster.hardware.engine, self._cluster.requests, worker.slot
        ready_for_s = self._clock() - worker.ready_since_s
        factor = float(np.exp(self._dice.normal(0.0, NOISE))) / engine.speed_up
        batch, context = int(self._cluster.d_batch[slot]), float(self._cluster.d_context[slot])
        if batch:
            step_ms = engine.decode_floor_ms + engine.decode_sequence_ms * batch + engine.decode_token_ms * context
            return StepSample(worker.worker_id, ready_for_s, 0, 0, batch, context, step_ms * factor)
        request = self._cluster.prompt_of(slot)
        if request is None:
            return None
        tokens, prompt = int(requests.uncached[request]), int(requests.prompt[request])
        pairs = tokens * (prompt - tokens + tokens / 2)
        step_ms = max(engine.prefill_floor_ms, engine.prefill_token_ms * tokens + engine.prefill_pair_ms * pairs)
        return StepSample(worker.worker_id, ready_for_s, tokens, pairs, 0, 0, step_ms * factor)

    # --- Workers

    def _start(self, worker_id: str, role: Role) -> Worker:
        if worker_id in self.workers:
            return self.workers[worker_id]
        self._advance()
        worker = Worker(worker_id, role, self._free.pop(), "starting", self._clock())
        self.workers[worker_id] = worker
        self.most_gpus = max(self.most_gpus, len(self.workers))
        return worker

    def _serve(self, worker: Worker) -> None:
        self._enter(worker, "ready")
        worker.ready_since_s = worker.ready_since_s or self._clock()
        self._cluster.open(worker.slot, worker.role)

    async def _emptied(self, worker: Worker) -> None:
        self._enter(worker, "draining")
        self._cluster.close(worker.slot)
        while not self._cluster.idle(worker.slot):
            await asyncio.sleep(POLL_S)
            self._advance()

    def _end(self, worker: Worker) -> None:
        self._advance()
        self._cluster.close(worker.slot)
        self._free.append(worker.slot)
        del self.workers[worker.worker_id]

    def _enter(self, worker: Worker, state: State) -> None:
        self._advance()
        worker.state, worker.since_s = state, self._clock()

    def _advance(self) -> None:
        now_s = self._clock()
        self.gpu_s += len(self.workers) * (now_s - self._changed_s)
        self._changed_s = now_s
        self._cluster.advance(now_s)

    def _marks(self) -> "_Marks":
        totals = self._cluster.totals()
        ttft, itl = self._cluster.ttft_histogram.copy(), self._cluster.itl_histogram.copy()
        return _Marks(self._cluster.now_s, totals.arrived, totals.finished, totals.output_tokens, ttft, itl)


@dataclass(frozen=True, slots=True)
class _Marks:
    """Totals at the last observation."""

    time_s: float
    arrived: int
    finished: int
    output_tokens: int
    ttft: "np.typing.NDArray[np.int64]"
    itl: "np.typing.NDArray[np.int64]"
