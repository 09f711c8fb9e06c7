"""The state of all workers, from discovery, the workers' reports and the supervisor's processes."""

import time
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import Final

from msgspec import Struct
from msgspec.structs import astuple

from baton_proto.discovery import LoadReport, WorkerLoad, WorkerRecord
from baton_proto.planner import DECODE, PREFILL, ROLES, Role, State, StepSample, WorkerView
from planner.acting.connector import WorkerProcess
from runtime.config.serving import ServingConfig
from runtime.discovery.directory import Change, Directory
from runtime.discovery.load_board import LoadBoard
from runtime.nats.client import NatsClient

WAITING_WEIGHT: Final = 0.02  # of a waiting request in the KV load
STEPS_KEPT: Final = 4096  # at most, between two observations
STATES: Final[dict[str, State]] = {"ready": "ready", "sleeping": "sleeping"}  # any other state counts as draining


class _Phase(Struct, frozen=True):
    incarnation: int
    state: State
    since_s: float


class WorkerBoard:
    """`processes` returns the supervisor's processes, discovered or not. Times are Unix time. For use in the event loop
    only."""

    def __init__(
        self,
        nats: NatsClient,
        config: ServingConfig,
        processes: Callable[[], Iterable[WorkerProcess]],
        gpus_per_worker: Mapping[Role, int],
    ) -> None:
        self._directory = Directory(nats)
        self._loads = LoadBoard(nats)
        self._config = config
        self._processes = processes
        self._gpus = gpus_per_worker
        self._phases: dict[str, _Phase] = {}
        self._lost_s: dict[str, float] = {}  # by worker id: when discovery lost the worker
        self._steps: list[StepSample] = []
        self._heard_s: float | None = None  # monotonic

    async def start(self) -> None:
        self._directory.on_change(self._changed)
        self._loads.on_report(self._reported)
        await self._loads.start()
        await self._directory.start()

    async def close(self) -> None:
        await self._directory.close()

    def age_s(self) -> float | None:
        """Seconds since the last report of any worker; None: there was none."""
        return None if self._heard_s is None else time.monotonic() - self._heard_s

    def take_steps(self) -> list[StepSample]:
        """The engine steps that workers timed since the last call, at most STEPS_KEPT."""
        steps, self._steps = self._steps, []
        return steps

    def views(self) -> list[WorkerView]:
        """All workers, ordered by id. A process that discovery does not list counts as starting, even if it hangs."""
        processes = {process.worker_id: process for process in self._processes()}
        views = [self._view(record, role, processes.pop(record.worker_id, None)) for record, role in self._listed()]
        views += [self._unlisted(process) for process in processes.values()]
        return sorted(views, key=lambda view: view.worker_id)

    def waiting_for_prefill(self) -> int:
        """Requests in the queues of prefill workers whose prompts have not begun."""
        return sum(self._load(record).load.waiting for record in self._serving(PREFILL))

    def kv_load(self) -> float:
        """Mean over ready decode workers of used KV fraction + 0.02 per waiting request; 0 without workers."""
        loads = [(record, self._load(record).load) for record in self._serving(DECODE)]
        return fmean(
            [load.blocks_used / max(1, record.num_blocks) + WAITING_WEIGHT * load.waiting for record, load in loads]
            or [0.0]
        )

    def serving(self, role: Role) -> int:
        """The number of ready workers of the role."""
        return len(self._serving(role))

    def _listed(self) -> list[tuple[WorkerRecord, Role]]:
        return [(record, role) for record in self._directory.workers.values() for role in ROLES if record.role == role]

    def _serving(self, role: Role) -> list[WorkerRecord]:
        return [record for record, its in self._listed() if its == role and record.state == "ready"]

    def _load(self, record: WorkerRecord) -> LoadReport:
        report = self._loads.reports.get(record.worker_id)
        if report is None or report.incarnation != record.incarnation:
            return _silent(record)
        return report

    def _view(self, record: WorkerRecord, role: Role, process: WorkerProcess | None) -> WorkerView:
        phase, report = self._phase(record), self._load(record)
        role = role if process is None else process.role
        return WorkerView(
            record.worker_id,
            role,
            phase.state,
            phase.since_s,
            _born_s(record),
            gpus=self._gpus[role],
            effect=None if process is None else process.leaving,
            running=report.load.running,
            max_running=self._config.engine.max_running,
            waiting=report.load.waiting,
            queued_prefill_tokens=report.load.queued_prefill_tokens,
            kv_used=min(1.0, report.load.blocks_used / max(1, record.num_blocks)),
            kv_tokens=record.num_blocks * record.block_size,
            context_tokens=report.context_tokens,
        )

    def _unlisted(self, process: WorkerProcess) -> WorkerView:
        worker_id = process.worker_id
        since_s = max(process.since_s, self._lost_s.get(worker_id, 0.0))
        gpus = self._gpus[process.role]
        return WorkerView(worker_id, process.role, "starting", since_s, gpus=gpus, effect=process.leaving)

    def _phase(self, record: WorkerRecord) -> _Phase:
        """A worker that is ready when it is first seen counts as ready since its start."""
        state: State = STATES.get(record.state, "draining")
        known = self._phases.get(record.worker_id)
        if known is None or (known.incarnation, known.state) != (record.incarnation, state):
            new = known is None or known.incarnation != record.incarnation
            since_s = _born_s(record) if new and state == "ready" else time.time()
            known = self._phases[record.worker_id] = _Phase(record.incarnation, state, since_s)
        return known

    def _changed(self, change: Change) -> None:
        worker_id = change.record.worker_id
        if change.kind == "removed":
            self._phases.pop(worker_id, None)
            self._loads.discard(worker_id)
            self._lost_s[worker_id] = time.time()
        else:
            self._lost_s.pop(worker_id, None)
            self._phase(change.record)

    def _reported(self, report: LoadReport) -> None:
        record = self._directory.workers.get(report.worker_id)
        if record is None or record.incarnation != report.incarnation:
            return
        self._heard_s = time.monotonic()
        ready_for_s = time.time() - _born_s(record)
        self._steps += [StepSample(report.worker_id, ready_for_s, *astuple(step)) for step in report.steps]
        del self._steps[:-STEPS_KEPT]


def _born_s(record: WorkerRecord) -> float:
    """Unix time of the worker's start, which is its incarnation in microseconds."""
    return record.incarnation / 1e6


def _silent(record: WorkerRecord) -> LoadReport:
    return LoadReport(
        version=record.version, worker_id=record.worker_id, incarnation=record.incarnation, load=WorkerLoad()
    )
