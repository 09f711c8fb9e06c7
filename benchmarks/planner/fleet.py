"""The simulated workers: a Connector whose verbs take simulated time."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from baton_proto.planner import ALL_VERBS, Role, State, Verb
from benchmarks.planner.serving import ServingCluster

POLL_S = 0.5  # between two checks whether a worker is drained


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

    def __init__(self, cluster: ServingCluster, gpus: int, delays: Delays, clock: Callable[[], float]) -> None:
        self.verbs: tuple[Verb, ...] = ALL_VERBS
        self.workers: dict[str, Worker] = {}
        self.stuck: set[str] = set()
        self.gpu_s = 0.0  # GPU seconds held so far
        self.most_gpus = 0
        self._cluster = cluster
        self._delays = delays
        self._clock = clock
        self._free = list(range(gpus))[::-1]
        self._changed_s = 0.0

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
        """Adds a worker that is ready at once."""
        self._serve(self._start(worker_id, role))

    def _start(self, worker_id: str, role: Role) -> Worker:
        if worker_id in self.workers:
            return self.workers[worker_id]
        self.advance()
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
            self.advance()

    def _end(self, worker: Worker) -> None:
        self.advance()
        self._cluster.close(worker.slot)
        self._free.append(worker.slot)
        del self.workers[worker.worker_id]

    def _enter(self, worker: Worker, state: State) -> None:
        self.advance()
        worker.state, worker.since_s = state, self._clock()

    def advance(self) -> None:
        """Advances the cluster to the clock's time, and counts the GPU seconds."""
        now_s = self._clock()
        self.gpu_s += len(self.workers) * (now_s - self._changed_s)
        self._changed_s = now_s
        self._cluster.advance(now_s)
