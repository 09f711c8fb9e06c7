"""The table of faults. A row says how often a fault is drawn, what it needs, how it is done and undone."""

import asyncio
import contextlib
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

import nats.errors
import psutil

from baton.service.local.child_process import SILENT_S
from runtime.processes.serving import BEAT_S
from tests.chaos.hostile.attacks import ATTACKS, Attack
from tests.chaos.hostile.effect import attacked
from tests.chaos.machine.disk import why_no_small_disk
from tests.chaos.machine.hosts import Host, why_no_netem
from tests.chaos.machine.limits import (
    lower_descriptors,
    lower_file_size,
    lower_memory,
    lower_threads,
    raise_again,
    raise_threads,
    why_no_limits,
    why_no_thread_limit,
)
from tests.chaos.machine.wires import WiredHost
from tests.chaos.plan import Odds, Strike
from tests.chaos.service.fleet import Fleet
from tests.chaos.service.member import Kind, Member
from tests.chaos.service.ray import RayFleet
from tests.chaos.service.rolling import RollingFleet
from tests.chaos.service.scenarios import KV, ROLL_OUT, Scenario
from tests.chaos.service.up import UpFleet

# A router that hangs for less is not killed. Its last beat may be as old as the time between two; the same once more is
# for a busy machine, on which beats and our own looks are late.
BORNE_S = SILENT_S - 2 * BEAT_S
# One that hangs for longer has been killed, even on a busy machine, and when another fault lets it go on once.
KILLED_S = BORNE_S + 2 * SILENT_S

Effect = Callable[[Fleet, Strike], AbstractAsyncContextManager[None]]


def nothing_needed() -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Fault:
    """`effect`: done when it is entered, undone when it is left. `needs`: why this machine cannot do it, empty when it
    can. `fits`: whether the scenario has what the fault strikes."""

    odds: Odds
    effect: Effect
    needs: Callable[[], str] = nothing_needed
    fits: Callable[[Scenario], bool] = lambda scenario: not scenario.hostile


@asynccontextmanager
async def _unable(fleet: Fleet, members: Sequence[Member], name: str) -> AsyncIterator[None]:
    """Errors of what depends on these members are warranted from here on, until the routers use them again."""
    for member in members:
        member.struck.append(name)
        fleet.lost(member)
    try:
        yield
    finally:
        for member in members:
            member.struck.remove(name)


def _chosen(fleet: Fleet, strike: Strike, *kinds: Kind) -> list[Member]:
    """A member that is up, the same for the same plan as long as the same ones are up; none when none is."""
    up = [member for member in fleet.of(*kinds) if member.ready]
    return [up[strike.target % len(up)]] if up else []


@asynccontextmanager
async def _ended(fleet: Fleet, members: Sequence[Member], how: signal.Signals, strike: Strike) -> AsyncIterator[None]:
    for member in members:
        member.expected_end, member.held_down = True, True
        for one in fleet.ends_with(member):
            one.expected_end = True
            fleet.lost(one)
    async with _unable(fleet, members, strike.fault):
        for member in members:
            member.signal(how)
        try:
            yield
        finally:
            for member in members:
                member.held_down = False


@asynccontextmanager
async def _kill(fleet: Fleet, strike: Strike, kinds: Sequence[Kind]) -> AsyncIterator[None]:
    async with _ended(fleet, _chosen(fleet, strike, *kinds), signal.SIGKILL, strike):
        yield


@asynccontextmanager
async def _engine_killed(fleet: Fleet, strike: Strike) -> AsyncIterator[None]:
    """vLLM's own process behind a worker, which ends then."""
    members = _chosen(fleet, strike, "prefill", "decode")
    async with _ended(fleet, members, signal.SIGCONT, strike):
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(member.pid).children():
                    if "EngineCore" in child.name():
                        child.kill()
        yield


@asynccontextmanager
async def _double_kill(fleet: Fleet, strike: Strike) -> AsyncIterator[None]:
    up = [member for member in fleet.of("prefill", "decode") if member.ready]
    first = strike.target % max(1, len(up))
    async with _ended(fleet, (up[first:] + up[:first])[:2], signal.SIGKILL, strike):
        yield


@asynccontextmanager
async def _role_gone(fleet: Fleet, strike: Strike) -> AsyncIterator[None]:
    kind: Kind = "prefill" if strike.target % 2 and fleet.scenario.prefill else "decode"
    async with _ended(fleet, [member for member in fleet.of(kind) if member.ready], signal.SIGKILL, strike):
        yield


@asynccontextmanager
async def _drain(fleet: Fleet, strike: Strike) -> AsyncIterator[None]:
    """A drained worker counts as expected to end; it starts again at once."""
    members = _chosen(fleet, strike, "prefill", "decode")
    for member in members:
        member.expected_end = True
        fleet.lost(member)
        member.signal(signal.SIGTERM)
    yield


@asynccontextmanager
async def _hang(fleet: Fleet, strike: Strike, kinds: Sequence[Kind]) -> AsyncIterator[None]:
    members = _chosen(fleet, strike, *kinds)
    async with _unable(fleet, members, strike.fault):
        for member in members:
            member.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for member in members:
                member.signal(signal.SIGCONT)


def _router_stopped(fleet: Fleet, strike: Strike) -> AbstractAsyncContextManager[None]:
    """The router goes on afterwards. In a service of `baton up` one that hangs for longer than BORNE_S does so until it
    is killed: between BORNE_S and the supervisor's bound either end would be right."""
    if isinstance(fleet, UpFleet) and strike.hold_s > BORNE_S:
        return _frozen(fleet, strike, _chosen(fleet, strike, "router"))
    return _hang(fleet, strike, ("router",))


def _routers_frozen(fleet: Fleet, strike: Strike) -> AbstractAsyncContextManager[None]:
    """One router, or at times each of them."""
    return _frozen(fleet, strike, _one_or_all(fleet, strike, "router"))


@asynccontextmanager
async def _frozen(fleet: Fleet, strike: Strike, members: Sequence[Member]) -> AsyncIterator[None]:
    """The members hang until the supervisor has killed them."""
    async with _unable(fleet, members, strike.fault), asyncio.TaskGroup() as group:
        group.create_task(_until_killed(fleet, members))
        yield


async def _until_killed(fleet: Fleet, members: Sequence[Member]) -> None:
    """Their ends are expected after BORNE_S and not sooner, and no later than KILLED_S after the last fault of the
    supervisor."""
    start_s = since_s = time.monotonic()
    while any(member.alive for member in members):
        now_s = time.monotonic()
        if any(one.struck for one in fleet.of("supervisor")):
            since_s = now_s
        for member in members:
            member.expected_end |= now_s - start_s > BORNE_S
            member.signal(signal.SIGSTOP)  # again: another fault may have let it go on
        if now_s - since_s > KILLED_S:
            fleet.problems.append("a router that hangs was not killed")
            return
        await asyncio.sleep(0.1)


@asynccontextmanager
async def _routers_killed(fleet: Fleet, strike: Strike) -> AsyncIterator[None]:
    async with _ended(fleet, _one_or_all(fleet, strike, "router"), signal.SIGKILL, strike):
        yield


def _one_or_all(fleet: Fleet, strike: Strike, kind: Kind) -> list[Member]:
    return [one for one in fleet.of(kind) if one.ready] if strike.target % 3 == 0 else _chosen(fleet, strike, kind)


@asynccontextmanager
async def _nats_killed(fleet: Fleet, strike: Strike, wiped: bool) -> AsyncIterator[None]:
    """Kills NATS, which starts again on the same port: at once where it is the service's own, else when the fault is
    over. Nobody else may be lost."""
    servers = [one for one in _one_or_all(fleet, strike, "nats") if not one.held_down]
    for server in servers:
        server.expected_end, server.held_down = True, True
        server.signal(signal.SIGSTOP)
        if wiped:
            shutil.rmtree(fleet.store_of(server), ignore_errors=True)
    await asyncio.gather(*(server.kill() for server in servers))
    try:
        yield
    finally:
        for server in servers:
            server.held_down = False


@asynccontextmanager
async def _streams_deleted(fleet: Fleet, strike: Strike) -> AsyncIterator[None]:
    if any(server.ready for server in fleet.of("nats")):
        try:
            client = await fleet.connect_nats()
            stream = client.jetstream()
            for info in await stream.streams_info():
                await stream.delete_stream(str(info.config.name))
            await client.close()
        except (nats.errors.Error, OSError, TimeoutError):
            pass  # the server is just being killed by another fault
    yield


@asynccontextmanager
async def _limited(
    fleet: Fleet, strike: Strike, lower: Callable[[int], tuple[int, int]], which: int, may_end: bool
) -> AsyncIterator[None]:
    """`may_end`: whether the process may give up for want of it."""
    members = _chosen(fleet, strike, "prefill", "decode")
    async with _unable(fleet, members, strike.fault):
        before = []
        for member in members:
            member.may_end = member.may_end or may_end
            with contextlib.suppress(ProcessLookupError, FileNotFoundError, psutil.NoSuchProcess):  # it has just ended
                before.append((member.pid, lower(member.pid)))
        try:
            yield
        finally:
            for pid, limit in before:
                raise_again(pid, which, limit)


@asynccontextmanager
async def _few_threads(fleet: Fleet, strike: Strike) -> AsyncIterator[None]:
    members = _chosen(fleet, strike, "prefill", "decode")
    async with _unable(fleet, members, strike.fault):
        pids = [member.pid for member in members]
        for pid in pids:
            lower_threads(pid)
        try:
            yield
        finally:
            for pid in pids:
                raise_threads(pid)


@asynccontextmanager
async def _full_disk(fleet: Fleet, strike: Strike) -> AsyncIterator[None]:
    """A NATS server of the service itself that cannot store any more is started again."""
    for server in fleet.of("nats"):
        server.may_end = server.may_end or fleet.scenario.own_nats > 0
    fleet.disk.fill()
    try:
        yield
    finally:
        fleet.disk.empty()


@asynccontextmanager
async def _kv_garbled(fleet: Fleet, strike: Strike) -> AsyncIterator[None]:
    """Garbles the disk of each worker, beneath its hands. It may cost time and nothing else."""
    dice = random.Random(strike.target)
    for path in sorted((fleet.disk.folder / KV).glob("*/*/*")):
        with contextlib.suppress(OSError):  # another fault has filled the disk, or the worker has dropped the file
            with path.open("r+b") as file:
                for _ in range(8):
                    file.seek(dice.randrange(path.stat().st_size + 1))
                    file.write(dice.randbytes(dice.choice((1, 64, 4096))))
            if dice.random() < 0.2:
                os.truncate(path, path.stat().st_size // 2)
    yield


@asynccontextmanager
async def _clock_jumps(fleet: Fleet, strike: Strike) -> AsyncIterator[None]:
    """Moves a clock by up to an hour, and back to the right time afterwards. It may cost nothing at all."""
    clocks = [one.clock for one in fleet.of("prefill", "decode", "router") if one.ready and one.clock is not None]
    clock = clocks[strike.target % len(clocks)] if clocks else None
    if clock is not None:
        clock.set((strike.target * 37) % 7200 - 3600)
    try:
        yield
    finally:
        if clock is not None:
            clock.set(0)


@asynccontextmanager
async def _next_generation(fleet: Fleet, strike: Strike) -> AsyncIterator[None]:
    """Begins a roll-out, which goes on for several rounds. It may cost nothing at all."""
    assert isinstance(fleet, RollingFleet)
    fleet.roll()
    yield


@asynccontextmanager
async def _rolled_out(fleet: Fleet, strike: Strike) -> AsyncIterator[None]:
    """Begins `baton rollout`, which goes on for several rounds. It may cost nothing at all."""
    assert isinstance(fleet, UpFleet)
    fleet.roll_out()
    yield


@asynccontextmanager
async def _node_killed(fleet: Fleet, strike: Strike) -> AsyncIterator[None]:
    """A node of the Ray cluster goes, with the worker on it; another one comes in its place."""
    assert isinstance(fleet, RayFleet)
    address = list(fleet.nodes)[strike.target % len(fleet.nodes)]
    members = fleet.on_node(address)
    for member in members:
        member.expected_end = True
    async with _unable(fleet, members, strike.fault):
        await fleet.remove_node(address)
        try:
            yield
        finally:
            await fleet.add_node()


def _host(fleet: Fleet, strike: Strike) -> Host:
    return fleet.hosts[strike.target % len(fleet.hosts)]


def _members_on(fleet: Fleet, host: Host) -> list[Member]:
    return [member for member in fleet.members.values() if member.host == host and member.kind != "nats"]


@asynccontextmanager
async def _network_cut(fleet: Fleet, strike: Strike) -> AsyncIterator[None]:
    host = _host(fleet, strike)
    async with _unable(fleet, _members_on(fleet, host), strike.fault):
        host.cable("down")
        try:
            yield
        finally:
            host.cable("up")


@asynccontextmanager
async def _connections_reset(fleet: Fleet, strike: Strike) -> AsyncIterator[None]:
    """Every connection to or from a host breaks at one instant, and may be made again at once."""
    host = _host(fleet, strike)
    assert isinstance(host, WiredHost)
    async with _unable(fleet, _members_on(fleet, host), strike.fault):
        host.reset()
    yield


@asynccontextmanager
async def _packets_lost(fleet: Fleet, strike: Strike) -> AsyncIterator[None]:
    """Warrants no error, as late ones do not."""
    host = _host(fleet, strike)
    host.lose(0.2)
    try:
        yield
    finally:
        host.lose(0)


@asynccontextmanager
async def _packets_delayed(fleet: Fleet, strike: Strike) -> AsyncIterator[None]:
    host = _host(fleet, strike)
    host.delay(0.02, 0.14)
    try:
        yield
    finally:
        host.delay(0, 0)


def _has_disk(scenario: Scenario) -> bool:
    return scenario.has_disk


def _with_vllm(scenario: Scenario) -> bool:
    return scenario.engine == "vllm"


def _ours(scenario: Scenario) -> bool:
    """What a process of vLLM does when it lacks something is its own affair."""
    return scenario.engine != "vllm" and not scenario.hostile


def _several_hosts(scenario: Scenario) -> bool:
    return scenario.hosts > 1


def _wired(scenario: Scenario) -> bool:
    return scenario.network == "wires"


def _supervised(scenario: Scenario) -> bool:
    return scenario.planner


def _shares_ports(scenario: Scenario) -> bool:
    return scenario.shares_ports


def _in_namespaces(scenario: Scenario) -> bool:
    return scenario.network == "namespaces"


def _attack(attack: Attack) -> Fault:
    """Warrants no error. A page is all that is no honest caller where no caller has a key."""
    fits = partial(_attacks, can_page="page" in attack.by)
    return Fault(Odds(f"hostile: {attack.name}", 2, (3.5, 4.5)), partial(attacked, attack=attack), fits=fits)


def _attacks(scenario: Scenario, can_page: bool) -> bool:
    return scenario.hostile and (scenario.keys or can_page)


WORKERS: tuple[Kind, ...] = ("prefill", "decode")
FAULTS: tuple[Fault, ...] = (
    Fault(Odds("kill", 6), partial(_kill, kinds=WORKERS)),
    Fault(Odds("kill engine", 4), _engine_killed, fits=_with_vllm),
    Fault(Odds("double kill", 2), _double_kill),
    Fault(
        Odds("kill router", 1),
        partial(_kill, kinds=("router",)),
        fits=lambda scenario: not (scenario.ray or scenario.hostile),
    ),
    Fault(Odds("role gone", 1, (0.0, 0.5), 6.0), _role_gone),
    Fault(Odds("drain", 4), _drain),
    Fault(Odds("next generation", 12), _next_generation, fits=lambda scenario: scenario.rolls),
    Fault(Odds(ROLL_OUT, 3), _rolled_out, fits=lambda scenario: scenario.planner and not scenario.ray),
    Fault(Odds("stop", 8, (0.05, 1.5), 15.0), partial(_hang, kinds=WORKERS)),
    Fault(Odds("stop router", 2, (0.05, 1.0), 8.0), _router_stopped),
    Fault(Odds("node killed", 4, (0.0, 2.0), 6.0), _node_killed, fits=lambda scenario: scenario.ray),
    Fault(Odds("kill supervisor", 2), partial(_kill, kinds=("supervisor",)), fits=_supervised),
    Fault(Odds("stop supervisor", 6, (0.1, 2.0), 12.0), partial(_hang, kinds=("supervisor",)), fits=_supervised),
    Fault(Odds("routers killed", 2), _routers_killed, fits=_shares_ports),
    Fault(Odds("routers frozen", 0.5), _routers_frozen, fits=lambda scenario: scenario.planner and not scenario.ray),
    Fault(Odds("NATS stopped", 2, (0.1, 1.5), 15.0), partial(_hang, kinds=("nats",))),
    Fault(Odds("NATS killed", 3, (0.1, 1.5), 10.0), partial(_nats_killed, wiped=False)),
    Fault(Odds("NATS lost its storage", 2, (0.1, 1.5), 10.0), partial(_nats_killed, wiped=True)),
    Fault(Odds("NATS streams deleted", 3), _streams_deleted),
    Fault(Odds("KV on disk garbled", 3), _kv_garbled, fits=_has_disk),
    Fault(
        Odds("few descriptors", 3, (0.3, 1.5), 5.0),
        partial(_limited, lower=lower_descriptors, which=resource.RLIMIT_NOFILE, may_end=False),
        why_no_limits,
        _ours,
    ),
    Fault(
        Odds("little memory", 2, (0.3, 1.5), 5.0),
        partial(_limited, lower=lower_memory, which=resource.RLIMIT_AS, may_end=True),
        why_no_limits,
        _ours,
    ),
    Fault(
        Odds("no file grows", 2, (0.3, 1.5), 5.0),
        partial(_limited, lower=lower_file_size, which=resource.RLIMIT_FSIZE, may_end=False),
        why_no_limits,
        _ours,
    ),
    Fault(Odds("few threads", 3, (0.3, 1.5), 5.0), _few_threads, why_no_thread_limit, _ours),
    Fault(Odds("full disk", 3, (0.3, 1.5), 5.0), _full_disk, why_no_small_disk, _ours),
    Fault(Odds("clock jumps", 20, (0.3, 4.0), 8.0), _clock_jumps, fits=lambda scenario: scenario.clocks),
    Fault(Odds("network cut", 8, (0.1, 1.5), 12.0), _network_cut, fits=_several_hosts),
    Fault(Odds("connections reset", 6), _connections_reset, fits=_wired),
    Fault(Odds("packets lost", 6, (0.5, 2.0), 8.0), _packets_lost, fits=_wired),
    Fault(Odds("packets delayed", 6, (0.5, 2.0), 8.0), _packets_delayed, fits=_wired),
    Fault(Odds("packets lost, netem", 6, (0.5, 2.0), 8.0), _packets_lost, why_no_netem, _in_namespaces),
    Fault(Odds("packets delayed, netem", 6, (0.5, 2.0), 8.0), _packets_delayed, why_no_netem, _in_namespaces),
    *map(_attack, ATTACKS),
)
BY_NAME = {fault.odds.name: fault for fault in FAULTS}


def usable(scenario: Scenario) -> tuple[list[Odds], dict[str, str]]:
    """The faults that can strike in this scenario on this machine, and why others cannot."""
    fitting = [fault for fault in FAULTS if fault.fits(scenario)]
    why = {fault.odds.name: fault.needs() for fault in fitting}
    able = [fault.odds for fault in fitting if not why[fault.odds.name]]
    odds = [replace(one, weight=10 * one.weight) if one.name in scenario.mostly else one for one in able]
    return odds, {name: said for name, said in why.items() if said}


async def strike_in(fleet: Fleet, strike: Strike) -> None:
    """Strikes, from the round's start until the fault is over."""
    await asyncio.sleep(strike.at_s)
    fleet.strikes += strike.fault != ROLL_OUT
    async with BY_NAME[strike.fault].effect(fleet, strike):
        await asyncio.sleep(strike.hold_s)
    fleet.strikes += strike.fault != ROLL_OUT
