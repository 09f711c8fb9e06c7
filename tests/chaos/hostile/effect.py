"""An attack as a fault: a process that attacks while the service's memory is watched."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil

from tests.chaos.hostile.__main__ import READY
from tests.chaos.hostile.attacks import Attack
from tests.chaos.plan import Strike
from tests.chaos.service.fleet import Fleet
from tests.chaos.service.member import ROOT, Member

MOST_BYTES = 256 << 20  # that a router or a worker may have more than in peace
MOST_CHILDREN_BYTES = 1 << 30  # that its helpers may have, all together
LOOK_S = 0.05
READY_S = 180.0  # many others may run on the machine
END_S = 10.0
SAID = 2000  # characters of what an attacker says at its end


def note_memory(fleet: Fleet) -> None:
    """Notes each member's memory in peace. What counts is the first time of each life."""
    for member in _watched(fleet):
        fleet.quiet_bytes.setdefault(member.pid, _bytes_of(psutil.Process(member.pid)))


@asynccontextmanager
async def attacked(fleet: Fleet, strike: Strike, attack: Attack) -> AsyncIterator[None]:
    """An attack. It ends early when the service swells, because other services run on this machine. Who has swollen
    starts again, for the attacks that follow to find something else."""
    (router,) = fleet.of("router")
    who = attack.by[strike.target % len(attack.by)] if fleet.scenario.keys else "page"
    command = ["-m", "tests.chaos.hostile", attack.name, who, router.addresses["http"], router.addresses["grpc"]]
    path = os.pathsep.join((str(ROOT), str(ROOT / "proto"), *sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "KEY": fleet.strangers_key}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=pipe, stderr=asyncio.subprocess.STDOUT, env=environment
    )
    assert process.stdout is not None
    said = b""
    watching = asyncio.create_task(_watch(fleet, process, f"{attack.name} by {who}"))
    try:
        said = await asyncio.wait_for(process.stdout.readline(), READY_S)
        fleet.under_attack.set()
        yield
    finally:
        fleet.under_attack.set()
        said += await _end(process)
        swollen = watching.result() if watching.done() else []
        watching.cancel()
    try:
        fleet.to_strangers.update(json.loads(said.removeprefix(READY)))
    except ValueError:
        fleet.problems.append(f"tests/chaos itself: {attack.name} says {said.decode(errors='replace')[-SAID:]}")
    for member, pid in swollen:
        if member.pid == pid and not member.expected_end:  # else another attack has ended this life
            member.expected_end = True
            await member.kill()


async def _end(process: asyncio.subprocess.Process) -> bytes:
    """Returns its last words."""
    assert process.stdout is not None
    _signal(process, signal.SIGTERM)
    try:
        return await asyncio.wait_for(process.stdout.read(), END_S)
    except TimeoutError:
        return b"nothing in time"
    finally:
        _signal(process, signal.SIGKILL)
        await process.wait()


async def _watch(fleet: Fleet, attacker: asyncio.subprocess.Process, name: str) -> list[tuple[Member, int]]:
    """Waits until somebody has swollen. Returns who, with their pids."""
    while True:
        told = {member.name: _swollen(fleet, member) for member in _watched(fleet)}
        if swollen := [member for member in _watched(fleet) if told.get(member.name)]:
            fleet.problems += [f"{name}: {told[member.name]}" for member in swollen]
            _signal(attacker, signal.SIGTERM)
            return [(member, member.pid) for member in swollen]
        await asyncio.sleep(LOOK_S)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Signals the process past its own methods, which would take its end from whoever waits for it."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _swollen(fleet: Fleet, member: Member) -> str:
    """What is too much; empty: nothing."""
    try:
        process = psutil.Process(member.pid)
        more = _bytes_of(process) - fleet.quiet_bytes.get(member.pid, sys.maxsize)
        helpers = sum(map(_bytes_of, process.children(recursive=True)))
    except psutil.Error:
        return ""
    fleet.most_more_bytes = max(fleet.most_more_bytes, more)
    if more > MOST_BYTES:
        return f"{member.name} has {more >> 20} MiB more than in peace"
    return f"{member.name}'s helpers have {helpers >> 20} MiB" if helpers > MOST_CHILDREN_BYTES else ""


def _watched(fleet: Fleet) -> list[Member]:
    return [member for member in fleet.of("router", "prefill", "decode") if member.ready and not member.expected_end]


def _bytes_of(process: psutil.Process) -> int:
    return int(process.memory_info().rss)
