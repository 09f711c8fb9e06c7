"""The loop: what it does with effects that are slow, fail or hang, and that a restart starts nothing twice."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from msgspec.structs import replace

from baton_proto.planner import ALL_VERBS, Observation, Role, Verb, WorkerView
from benchmarks.planner.event_loop import run_simulated
from planner.acting.connector import ConnectorError
from planner.journal import Decided, EffectEnded, Line, Started
from planner.loop import PlannerLoop
from planner.planner import Planner
from runtime.config.planner import LimitsConfig, PlannerConfig
from runtime.errors import UnavailableError
from tests.planner.observations import observation

CONFIG = PlannerConfig(
    interval_s=5.0,
    limits=LimitsConfig(min_prefill=1, min_decode=1),
    start_s=20.0,
)
START_S = 20.0


class Processes:
    """A connector and observer. What is done to a worker is written down; `broken` ones fail, `hanging` ones hang."""

    verbs: tuple[Verb, ...] = ALL_VERBS

    def __init__(self) -> None:
        self.workers: dict[str, WorkerView] = {}
        self.calls: list[tuple[float, str, str]] = []
        self.broken = False
        self.hanging = False
        self.blind = False

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def observe(self) -> Observation:
        if self.blind:
            raise UnavailableError("NATS is away")
        return observation(self.now_s(), list(self.workers.values()))

    async def add(self, worker_id: str, role: Role) -> None:
        self.calls.append((self.now_s(), "add", worker_id))
        if self.broken:
            raise ConnectorError("add", worker_id, "no node has room")
        self.workers.setdefault(worker_id, WorkerView(worker_id, role, "starting", self.now_s()))
        await asyncio.sleep(1e9 if self.hanging else START_S)
        self.workers[worker_id] = WorkerView(worker_id, role, "ready", self.now_s(), self.now_s())

    async def remove(self, worker_id: str) -> None:
        self.calls.append((self.now_s(), "remove", worker_id))
        self.workers.pop(worker_id, None)

    async def drain(self, worker_id: str) -> None:
        self.calls.append((self.now_s(), "drain", worker_id))
        await asyncio.sleep(1.0)
        self.workers.pop(worker_id, None)

    async def sleep(self, worker_id: str) -> None: ...

    async def wake(self, worker_id: str) -> None: ...

    async def flip(self, worker_id: str, role: Role) -> None: ...

    def count(self, state: str) -> int:
        return sum(worker.state == state for worker in self.workers.values())


async def plan(processes: Processes, seconds: float, planner: Planner | None = None, **options: Any) -> list[Line]:
    lines: list[Line] = []
    clock: Callable[[], float] = asyncio.get_running_loop().time
    loop = PlannerLoop(
        CONFIG, planner or Planner(CONFIG), processes.observe, processes, clock=clock, write=lines.append, **options
    )
    task = asyncio.create_task(loop.run())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return lines


def simulated(main: Coroutine[Any, Any, list[Line]]) -> list[Line]:
    return run_simulated(main)


def test_it_starts_the_least_and_does_not_wait_for_them() -> None:
    processes = Processes()
    lines = simulated(plan(processes, 61))
    assert [(time_s, verb) for time_s, verb, _ in processes.calls] == [(0, "add"), (0, "add")]
    assert isinstance(lines[0], Started)
    assert sum(isinstance(line, Decided) for line in lines) == 13
    ended = [line for line in lines if isinstance(line, EffectEnded)]
    assert [(line.duration_s, line.error) for line in ended] == [(START_S, "")] * 2


def test_effects_in_flight_are_part_of_the_observation() -> None:
    decided = [line for line in simulated(plan(Processes(), 11)) if isinstance(line, Decided)]
    assert [worker.effect for worker in decided[1].observation.workers] == ["add", "add"]
    assert decided[1].target.actions == []


def test_a_start_that_hangs_is_ended_at_its_deadline_and_tried_again_later() -> None:
    processes = Processes()
    processes.hanging = True
    lines = simulated(plan(processes, 170))
    starts = [time_s for time_s, verb, _ in processes.calls if verb == "add"]
    assert starts[:2] == [0, 0]
    assert [130 <= time_s <= 140 for time_s in starts[2:]] == [True, True]
    removed = [worker_id for _, verb, worker_id in processes.calls if verb == "remove"]
    assert sorted(removed) == ["decode-2", "prefill-1"]
    assert any(isinstance(line, EffectEnded) and "after 100 s" in line.error for line in lines)


def test_starts_that_are_refused_are_tried_ever_later_with_the_reason_shown() -> None:
    processes = Processes()
    processes.broken = True
    lines = simulated(plan(processes, 400))
    starts = sorted({time_s for time_s, _, _ in processes.calls})
    assert starts == [0, 35, 100, 225]
    assert any(isinstance(line, Decided) and "no node has room" in " ".join(line.target.reasons) for line in lines)


def test_nothing_is_done_while_nothing_can_be_observed() -> None:
    processes = Processes()
    processes.blind = True
    assert len(simulated(plan(processes, 60))) == 1
    assert processes.calls == []


def test_a_planner_that_only_advises_does_nothing() -> None:
    processes = Processes()
    lines = simulated(plan(processes, 30, held=lambda: "advice only"))
    assert processes.calls == []
    decided = [line for line in lines if isinstance(line, Decided)]
    assert decided[0].advice_only
    assert [action.verb for action in decided[0].target.actions] == ["add", "add"]


def test_a_planner_restarted_in_mid_start_starts_nothing_twice() -> None:
    async def run() -> list[Line]:
        processes, saved = Processes(), []

        async def save(data: bytes) -> None:
            saved.append(data)

        await plan(processes, 7, save=save)
        for worker_id, view in processes.workers.items():  # the processes go on without their planner
            processes.workers[worker_id] = replace(view, state="starting")
        heir = Planner(CONFIG)
        heir.restore(saved[-1])
        lines = await plan(processes, 20, heir)
        assert len(processes.calls) == 2
        return lines

    simulated(run())


def test_a_simulation_in_which_nothing_can_happen_any_more_says_so() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="never comes"):
        run_simulated(forever())
