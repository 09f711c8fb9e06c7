"""A service that `baton up --planner` has started: whoever dies is replaced by it, and not by tests/chaos.

NATS is a server of ours beside the service, or its own.
"""

import asyncio
import contextlib
import json
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from baton.service.service_run import STARTS
from runtime.security.cluster_key import OPERATOR
from runtime.security.keys import OPERATOR_KEY_VARIABLE
from tests.chaos.service.fleet import BASE, Fleet, pair, set_event
from tests.chaos.service.member import Kind, Member
from tests.chaos.service.scenarios import merged
from tests.chaos.service.upgrades import roll_out

SUPERVISOR = "supervisor"
STARTS_S = 60.0  # a supervisor gives up after STARTS within less
PLANNER: dict[str, Any] = {"enabled": True, "interval_s": 0.5}
KINDS: dict[str, Kind] = {"nats": "nats", "router": "router", "prefill_worker": "prefill", "decode_worker": "decode"}


@dataclass(eq=False)
class Adopted(Member):
    """A process that another one has started. It has one life."""

    own_pid: int = 0
    _handle: int = -1  # a descriptor of the process, from adopt() until its end has been noticed
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def pid(self) -> int:
        return self.own_pid

    @property
    def alive(self) -> bool:
        return self._handle >= 0 and not select.select([self._handle], [], [], 0)[0]

    def adopt(self) -> bool:
        """Returns False when it has ended meanwhile."""
        self._over.clear()
        try:
            self._handle = os.pidfd_open(self.own_pid)
        except ProcessLookupError:
            self._over.set()
            return False
        asyncio.get_running_loop().add_reader(self._handle, self._end)  # it is readable when the process has ended
        return self.alive

    async def ended(self) -> int:
        """The code is known to its parent alone."""
        await self._over.wait()
        return 0

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await self.ended()

    async def stop(self, timeout_s: float) -> bool:
        """Whoever has started it, ends it."""
        await asyncio.wait_for(self.ended(), timeout_s)
        return True

    def signal(self, number: signal.Signals) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        os.close(self._handle)
        self._handle = -1
        self._over.set()


@dataclass(eq=False)
class Up(Member):
    """`baton up --json`. `on_ready` hears of each process that it has started, `on_drain` the name of each one that a
    roll-out or the planner ends."""

    on_ready: Callable[[dict[str, Any]], None] = lambda news: None
    on_drain: Callable[[str], None] = lambda name: None

    async def stop(self, timeout_s: float) -> bool:
        """Code 1 says that processes were lost, which faults have seen to."""
        return await super().stop(timeout_s) or (self.process is not None and self.process.returncode == 1)

    async def _until_ready(self, process: asyncio.subprocess.Process) -> dict[str, str]:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            if self._heard(line) == "planner":
                self.may_end = False
                self._drain = asyncio.create_task(self._hear_on(process, process.stdout))
                return {"up": "planner"}
        if self.expected_end or self.may_end:
            return {}  # a life that a fault has ended, as any other one
        raise RuntimeError(f"{self.name} ended with {await process.wait()} before it was ready; see {self.log_file}")

    async def _hear_on(self, process: asyncio.subprocess.Process, stream: asyncio.StreamReader) -> None:
        """What a supervisor said last that has ended is of processes that end with it."""
        while line := await stream.readline():
            if process.returncode is None:
                self._heard(line)

    def _heard(self, line: bytes) -> str:
        (news,) = json_lines(line)
        if news["event"] == "ready":
            self.on_ready(news)
        elif news["event"] == "drains":
            self.on_drain(news["id"])
        return str(news["event"])


def json_lines(said: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.splitlines()]


@dataclass(eq=False)
class UpFleet(Fleet):
    _wanted: dict[Kind, int] = field(default_factory=dict)
    _router_deaths: deque[float] = field(default_factory=lambda: deque(maxlen=STARTS))
    _rolled: asyncio.Event = field(default_factory=set_event)  # no roll-out is under way
    _changed: int = 0  # the life of the supervisor whose service has the other settings
    _drained: set[str] = field(default_factory=set)  # workers that were told to end before they were ready

    def complete(self) -> bool:
        counts = all(len(self.of(kind)) == count for kind, count in self._wanted.items())
        return counts and self.members[SUPERVISOR].ready and super().complete()

    async def until_whole(self) -> None:
        await self._rolled.wait()
        await super().until_whole()

    def roll_out(self) -> None:
        """Begins to change to the other settings, or back, if no change is under way."""
        if self._rolled.is_set():
            self._rolled.clear()
            self._go(self._roll_out())

    async def _roll_out(self) -> None:
        supervisor, strikes = self.members[SUPERVISOR], self.strikes
        life, before = supervisor.lives, self.of("router", "prefill", "decode")
        back = self._changed == life
        try:
            servers = [one.addresses["nats"] for one in self.of("nats") if one.ready]
            if not servers:
                return
            url = f"{'tls' if self.scenario.secured else 'nats'}://{servers[0]}"
            key = {OPERATOR_KEY_VARIABLE: self.cluster.derive(OPERATOR).reveal()}
            end = await roll_out(url, back, self._variables() | key)
            if problem := end.problem(may_fail=self.strikes > strikes):
                self.problems.append(problem)
            if end.code == 0:
                self._changed = 0 if back else life
                stayed = [one.name for one in before if end.done and one.name in end.planned and one.alive]
                self.problems += [f"{name} is as before a roll-out that has ended" for name in stayed]
        finally:
            self._rolled.set()

    def lost(self, member: Member) -> None:
        super().lost(member)
        if member.alive or self.members.get(member.name) is not member:
            return
        supervisor = self.members[SUPERVISOR]
        if member is supervisor:
            self._drained.clear()  # the next one may give the names again
        for one in self.ends_with(member):
            one.expected_end = True
            if member is supervisor and one is not supervisor:
                del self.members[one.name]
        if member is not supervisor and not supervisor.ready:
            supervisor.may_end = True  # a service that comes up gives up when it loses anyone
        if member.kind == "router":
            self._router_deaths.append(time.monotonic())
            if len(self._router_deaths) == STARTS and time.monotonic() - self._router_deaths[0] < STARTS_S:
                supervisor.may_end = True

    def ends_with(self, member: Member) -> list[Member]:
        """All end with the supervisor."""
        if member.kind != "supervisor":
            return []
        own_nats = self.of("nats") if self.scenario.own_nats else []
        return [*self.of("supervisor", "router", "prefill", "decode"), *own_nats]

    def _add_members(self) -> None:
        workers, scenario = {"prefill": self.scenario.prefill, "decode": self.scenario.decode}, self.scenario
        self._wanted = {"prefill": scenario.prefill, "decode": scenario.decode, "router": scenario.routers, "nats": 1}
        if scenario.own_nats:
            self._wanted["nats"] = scenario.own_nats
            nats: dict[str, Any] = {"servers": scenario.own_nats, "store_dir": str(self.disk.folder / "nats")}
        else:
            nats = {"url": self._add_nats()}
        limits = {f"{end}_{role}": count for end in ("min", "max") for role, count in workers.items()}
        config = merged(
            BASE, scenario.sections(self.device, self.disk.folder), {"planner": PLANNER | {"limits": limits}}
        )
        config = merged(config, {"model": self.model, "nats": nats, "workers": workers})
        config = merged(config, {"router": {"replicas": scenario.routers}})
        self.config_file.write_text(yaml.safe_dump(config))
        self.members[SUPERVISOR] = self._supervisor()

    @property
    def config_file(self) -> Path:
        return self.folder / "serving.yaml"

    def _supervisor(self) -> Member:
        command = ["baton", "up", "--json", "--config", str(self.config_file)]
        log, variables = self.disk.folder / "supervisor.log", self._variables()
        return Up(
            SUPERVISOR, "supervisor", command, log, variables=variables, on_ready=self._adopt, on_drain=self._retire
        )

    def _adopt(self, news: dict[str, Any]) -> None:
        kind = KINDS.get(news["process"])
        if kind is None:
            return
        log = self.disk.folder / f"{news['id']}.log"
        member = Adopted(news["id"], kind, (), log, addresses=news["addresses"], lives=1, own_pid=news["pid"])
        if not member.adopt():
            return
        self.members[member.name] = member
        self.known[member.name] = kind
        self._note_pids(member)
        self._open_door(member)
        if member.name in self._drained:
            self._drained.remove(member.name)
            self._retire(member.name)
        self._go(self._tend_adopted(member))

    def _retire(self, name: str) -> None:
        """Notes that nothing warrants an error: others take a worker's new requests, and a router ends its own."""
        member = self.members.get(name)
        if member is None:
            self._drained.add(name)
            return
        member.expected_end, member.retired = True, True
        if member.kind != "router":
            self._left(member)

    def _left(self, member: Member) -> None:
        now_s = time.monotonic()
        pairs = [pair(*ends) for one in self.members for ends in ((one, member.name), (member.name, one))]
        for name in (member.name, *pairs):
            self.timeline.left(name, now_s)

    async def _tend_adopted(self, member: Adopted) -> None:
        await member.ended()
        member.addresses = {}
        if self._closing:
            return
        supervisor = self.members[SUPERVISOR]
        gives_up = not supervisor.ready and any(one.expected_end for one in self.members.values())  # see `lost`
        if not (gives_up or any(one.expected_end or one.may_end for one in (member, supervisor))):
            self.problems.append(f"{member.name} ended unasked (struck: {member.struck})")
        (self._left if member.retired else self.lost)(member)
        self.deaths += 1
        if self.members.get(member.name) is member:
            del self.members[member.name]
