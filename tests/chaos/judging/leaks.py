"""What is left behind: blocks and leases after each round, descriptors, threads and memory over many rounds."""

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import grpc
import psutil

from baton_proto.generated import inference_pb2 as pb
from baton_proto.worker import InspectReport
from runtime import side_lane
from runtime.calls.worker import WorkerClient
from runtime.errors import BatonError
from tests.chaos.service.fleet import Fleet
from tests.chaos.service.member import Member

IDLE_LIMIT_S = 20.0  # longer than a lease lives, which may be what frees its blocks
POLL_S = 0.03
INSPECT_TIMEOUT_S = 4.0
TREE_LIMIT_S = 15.0
MORE_DESCRIPTORS = 12  # than at the first look, that are no leak: connections come and go
MORE_THREADS = 3 + side_lane.THREADS  # of ours: pools start a thread when work first waits for it, and keep it
# gRPC's pool begins with a thread per core, 4 to 16. Under load it starts another each second, until it has about as
# many as connections have work at once: on two cores 30 for 24 connections of attackers, 86 for 80. It ends a thread
# that had no work for 20 s: 30 and 127 were 4 again after 50 s without calls. But threads take turns, so a call now and
# then keeps all of them. Three strangers with 16 connections each may strike at once.
POOL = "event_engine"
POOL_THREADS = 16 + 3 * 16
MORE_BYTES = 96 << 20


@dataclass(frozen=True, slots=True)
class Left:
    """`blocks`, `leases`: that a worker holds, though no request is left."""

    problem: str
    blocks: int = 0
    leases: int = 0


@dataclass(frozen=True, slots=True)
class Look:
    """A look at one life of a process while nothing runs."""

    life: tuple[str, int]
    round: int
    descriptors: int
    threads: int  # without those of gRPC's pool
    rss_bytes: int
    pool_threads: int = 0


async def until_idle(fleet: Fleet) -> dict[str, Left]:
    """Waits until no worker that is up holds a block or a lease. Returns what is wrong, by worker: accounts that do not
    add up, or what is still held after IDLE_LIMIT_S."""
    deadline_s = time.monotonic() + IDLE_LIMIT_S
    while True:
        up = [one for one in fleet.of("prefill", "decode") if one.ready and not one.struck and not one.expected_end]
        wrong: dict[str, Left] = {}
        broken: dict[str, Left] = {}
        for member, report in zip(up, await asyncio.gather(*(_inspect(fleet, one) for one in up)), strict=True):
            if isinstance(report, str):
                if member.ready and not member.expected_end:
                    wrong[member.name] = Left(f"does not answer: {report}")
            elif _busy(report):
                problem = f"still held after {IDLE_LIMIT_S:.0f} s: {report.load}"
                wrong[member.name] = Left(problem, report.load.blocks_used, report.load.leases)
            elif report.problems:
                broken[member.name] = Left(str(report.problems))
        if not wrong or time.monotonic() > deadline_s:
            return wrong | broken
        await asyncio.sleep(POLL_S)


async def until_trees_are_right(fleet: Fleet) -> list[str]:
    """Compares each router's tree with the workers' tables. Returns what is still different after TREE_LIMIT_S."""
    deadline_s = time.monotonic() + TREE_LIMIT_S
    while True:
        wrong = []
        for router, model in product(fleet.of("router"), fleet.scenario.models or ("",)):
            try:
                diffs = await fleet.doors[router.name].grpc.diff(pb.DiffRequest(model=model), TREE_LIMIT_S)
            except grpc.aio.AioRpcError as error:
                wrong.append(f"{router.name}: {error.details()}")
                continue
            wrong += [
                f"{router.name}'s tree of {one.worker_id}: {one.missing} missing, {one.extra} extra, "
                f"{one.changed} changed {one.note}"
                for one in diffs
                if one.missing or one.extra or one.changed
            ]
        if not wrong or time.monotonic() > deadline_s:
            return wrong
        await asyncio.sleep(0.3)


def threads_of(pid: int) -> Counter[str]:
    """Counts the threads of a process by the names that the system has for them."""
    names: Counter[str] = Counter()
    for file in Path(f"/proc/{pid}/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            names[file.read_text().strip()] += 1
    return names


def look(fleet: Fleet, number: int) -> list[Look]:
    found = []
    for member in fleet.members.values():
        process = psutil.Process(member.pid)
        descriptors = len(os.listdir(f"/proc/{member.pid}/fd"))
        names = threads_of(member.pid)
        ours, pool = names.total() - names[POOL], names[POOL]
        found.append(Look((member.name, member.pid), number, descriptors, ours, process.memory_info().rss, pool))
    return found


@dataclass(slots=True)
class Growth:
    """What the lives of processes had grown by at the last look, since the first one.

    `mib_per_100_rounds`: by kind of process the slopes of the resident memory, by least squares, of lives that were
    seen four times or more.
    """

    problems: list[str] = field(default_factory=list)
    most_descriptors: int = 0
    most_threads: int = 0
    mib_per_100_rounds: dict[str, list[float]] = field(default_factory=dict)


def growth(looks: Sequence[Look], most_bytes: int = MORE_BYTES) -> Growth:
    lives: dict[tuple[str, int], list[Look]] = {}
    for one in looks:
        lives.setdefault(one.life, []).append(one)
    result = Growth()
    for (name, pid), seen in lives.items():
        first, last = seen[0], seen[-1]
        descriptors, threads = last.descriptors - first.descriptors, last.threads - first.threads
        result.most_descriptors = max(result.most_descriptors, descriptors)
        result.most_threads = max(result.most_threads, threads)
        if descriptors > MORE_DESCRIPTORS:
            result.problems.append(f"{name} (pid {pid}) holds {descriptors} descriptors more after round {last.round}")
        if threads > MORE_THREADS:
            result.problems.append(f"{name} (pid {pid}) has {threads} threads more after round {last.round}")
        if last.pool_threads > POOL_THREADS:
            result.problems.append(
                f"{name} (pid {pid}) has {last.pool_threads} threads of gRPC after round {last.round}"
            )
        if last.rss_bytes - first.rss_bytes > most_bytes:
            result.problems.append(f"{name} (pid {pid}) grew by {(last.rss_bytes - first.rss_bytes) >> 20} MiB")
        if len(seen) >= 4:
            kind = name.partition("-")[0]
            bytes_per_round = slope([one.round for one in seen], [one.rss_bytes for one in seen])
            result.mib_per_100_rounds.setdefault(kind, []).append(round(bytes_per_round * 100 / (1 << 20), 3))
    return result


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The slope of the line with the least squares through the points."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0


def _busy(report: InspectReport) -> bool:
    load = report.load
    return bool(load.running or load.waiting or load.blocks_used or load.leases)


async def _inspect(fleet: Fleet, member: Member) -> InspectReport | str:
    """A string says why there is no report."""
    async with WorkerClient(member.name, member.addresses["rpc"], fleet.cluster) as client:
        try:
            return await client.inspect(INSPECT_TIMEOUT_S)
        except BatonError as error:
            return str(error)
