"""A simulated run of requests and a planner, and its outcome. The planner's loop is that of a live service."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from baton_proto.planner import DECODE, OTHER_ROLE, PREFILL, ROLES, Role
from benchmarks.planner.event_loop import run_simulated
from benchmarks.planner.fleet import Delays, Fleet
from benchmarks.planner.observer import SAMPLE_S, FleetObserver
from benchmarks.planner.serving import Hardware, Limits, ServingCluster
from planner.journal import Decided, Line
from planner.loop import PlannerLoop
from planner.planner import Planner
from planner.policy import pace
from runtime.config.planner import PlannerConfig
from simulator.requests import Requests

DOWN = ("drain", "sleep", "remove")
DRAIN_S = 300.0  # simulated after the end, for answers to end


@dataclass(frozen=True, slots=True)
class Setting:
    hardware: Hardware
    limits: Limits
    delays: Delays
    gpus: int
    duration_s: float
    begin: tuple[int, int]  # ready prefill and decode workers at the start


@dataclass(frozen=True, slots=True)
class Outcome:
    requests: int
    attainment: float  # share of all requests that ended with TTFT and ITL within Limits
    ttft_attainment: float
    gpu_hours: float
    actions: int  # workers added, drained, put to sleep, woken or flipped
    reversals: int  # actions that undo one of the same role less than `reversal_s` before
    most_gpus: int


def simulate(
    requests: Requests,
    setting: Setting,
    config: PlannerConfig,
    seed: int = 0,
    write: Callable[[Line], None] = lambda line: None,
) -> Outcome:
    """Runs the planner of `config` over `requests` for `setting.duration_s`. `write` receives the journal's lines."""
    actions: list[tuple[float, str, Role]] = []

    def note(line: Line) -> None:
        if isinstance(line, Decided):
            actions.extend((line.time_s, action.verb, action.role) for action in line.target.actions)
        write(line)

    async def run() -> tuple[ServingCluster, Fleet]:
        clock = asyncio.get_running_loop().time
        cluster = ServingCluster(requests, setting.hardware, setting.limits, setting.gpus)
        fleet = Fleet(cluster, setting.gpus, setting.delays, clock)
        _begin(fleet, setting.begin)
        observer = FleetObserver(fleet, cluster, setting.gpus, clock, seed)
        loop = PlannerLoop(config, Planner(config), observer, fleet, clock=clock, write=note)
        samples, planning = asyncio.create_task(_sample(observer)), asyncio.create_task(loop.run())
        await asyncio.sleep(setting.duration_s)
        samples.cancel()
        planning.cancel()
        await asyncio.gather(samples, planning, return_exceptions=True)
        fleet.advance()  # counts GPU hours up to now
        return cluster, fleet

    cluster, fleet = run_simulated(run())
    gpu_hours = fleet.gpu_s / 3600
    cluster.advance(setting.duration_s + DRAIN_S)
    return _outcome(cluster, gpu_hours, fleet.most_gpus, actions, pace.REVERSAL_S)


def follow(requests: Requests, setting: Setting, schedule: list[tuple[int, int]], every_s: float) -> Outcome:
    """Runs `requests` with the scheduled (prefill, decode) workers in each period of `every_s`. Workers start without
    delay; those that leave finish their requests, but no longer count as GPUs."""
    slots = 2 * (max(p for p, _ in schedule) + max(d for _, d in schedule))
    cluster = ServingCluster(requests, setting.hardware, setting.limits, slots)
    gpu_s, actions, before, most = 0.0, 0, schedule[0], 0
    prefill, decode = list(range(slots // 2)), list(range(slots // 2, slots))
    for number, (p, d) in enumerate(schedule):
        for pool, role, count in ((prefill, PREFILL, p), (decode, DECODE, d)):
            for index, slot in enumerate(pool):
                if index < count:
                    cluster.open(slot, role)
                else:
                    cluster.close(slot)
        cluster.advance((number + 1) * every_s)
        gpu_s += (p + d) * every_s
        actions += abs(p - before[0]) + abs(d - before[1])
        before, most = (p, d), max(most, p + d)
    cluster.advance(len(schedule) * every_s + DRAIN_S)
    return _outcome(cluster, gpu_s / 3600, most, [], 0.0, actions)


def _begin(fleet: Fleet, counts: tuple[int, int]) -> None:
    number = 0
    for role, count in zip(ROLES, counts, strict=True):
        for _ in range(count):
            number += 1
            fleet.serve_now(f"{role}-{number}", role)


async def _sample(observer: FleetObserver) -> None:
    while True:
        await asyncio.sleep(SAMPLE_S)
        observer.sample()


def _outcome(
    cluster: ServingCluster,
    gpu_hours: float,
    most_gpus: int,
    actions: list[tuple[float, str, Role]],
    reversal_s: float,
    num_actions: int | None = None,
) -> Outcome:
    totals, requests = cluster.totals(), len(cluster.requests.arrival_s)
    return Outcome(
        requests,
        totals.met / max(1, requests),
        totals.ttft_met / max(1, requests),
        gpu_hours,
        len(actions) if num_actions is None else num_actions,
        reversals(actions, reversal_s),
        most_gpus,
    )


def reversals(actions: list[tuple[float, str, Role]], within_s: float) -> int:
    """The number of actions that undo one of the same role less than `within_s` before; each is undone at most once. A
    flip counts for both roles."""
    moves: list[tuple[float, Role, int]] = []
    for time_s, verb, role in actions:
        moves.append((time_s, role, -1 if verb in DOWN else 1))
        if verb == "flip":
            moves.append((time_s, OTHER_ROLE[role], -1))
    count = 0
    standing: dict[tuple[Role, int], list[float]] = {(role, way): [] for role in ROLES for way in (-1, 1)}
    for time_s, role, way in moves:
        opposite = standing[role, -way]
        if opposite and time_s - opposite[-1] < within_s:
            opposite.pop()
            count += 1
        standing[role, way].append(time_s)
    return count
