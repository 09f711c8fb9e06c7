"""A service on a Ray cluster of this machine, with a node per worker, whose nodes and control actor are struck too."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import psutil

from baton_proto.generated import inference_pb2 as pb
from tests.chaos.service.fleet import POLL_S
from tests.chaos.service.member import Member
from tests.chaos.service.up import SUPERVISOR, Adopted, UpFleet, json_lines

UP_S = 200.0  # Ray's processes share the cores with ours
DOWN_S = 90.0
FIRST_NODE = 3  # of 127.0.0.x


@dataclass(eq=False)
class Control(Adopted):
    """The control actor. To start it is to run `baton up --ray`, which takes over what lives."""

    fleet: "RayFleet | None" = None

    async def start(self) -> None:
        assert self.fleet is not None
        self.addresses, self.expected_end, self.may_end, self.lives = {}, False, False, self.lives + 1
        try:
            said = await self.fleet.baton("up", "--ray", "--json", "--config", str(self.fleet.config_file))
        except RuntimeError:
            if not self.may_end:
                raise
            return  # a life that a fault has ended, as the one before, whose end ended() still tells
        for news in json_lines(said):
            if news["event"] == "ready":
                self.fleet.meet(news)
        (self.own_pid,) = [process.pid for process in _of_cluster(self.fleet.variables["RAY_TMPDIR"], "ray::Control")]
        if self.adopt():
            self.addresses, self.may_end = {"up": "control"}, False


@dataclass(eq=False)
class RayFleet(UpFleet):
    """`nodes`: addresses of those beside the head."""

    whole_within_s: float = 150.0  # a node's death is noticed late, and a lease for a worker's place takes long
    nodes: list[str] = field(default_factory=list)
    address: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    _next_node: int = FIRST_NODE
    _owner: asyncio.subprocess.Process | None = None
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self) -> None:
        with (self.folder / "ray-nodes.log").open("ab") as log:
            self._owner = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.chaos.service.ray_nodes",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        about = await self._answer()
        self.address, self.variables = about["address"], about["variables"]
        for _ in range(self.scenario.prefill + self.scenario.decode - 1):
            await self.add_node()
        await super().start()

    async def add_node(self) -> None:
        """Adds a node with room for one worker, at an address that no node has had."""
        address, self._next_node = f"127.0.0.{self._next_node}", self._next_node + 1
        await self._tell(f"add {address}")
        self.nodes.append(address)

    async def remove_node(self, address: str) -> None:
        self.nodes.remove(address)
        await self._tell(f"remove {address}")

    def on_node(self, address: str) -> list[Member]:
        return [one for one in self.of("prefill", "decode") if one.addresses.get("rpc", "").startswith(f"{address}:")]

    async def close(self) -> None:
        """Ends the service, NATS and the cluster."""
        self._closing = True
        try:
            if self.members and not self.hurry:
                await self.baton("down", timeout_s=DOWN_S)
            await super().close()
        finally:
            if self._owner is not None and self._owner.stdin is not None:
                self._owner.stdin.close()
                await self._owner.wait()

    async def _tell(self, line: str) -> None:
        assert self._owner is not None
        assert self._owner.stdin is not None
        async with self._one_at_a_time:
            self._owner.stdin.write(f"{line}\n".encode())
            await self._answer()

    async def _answer(self) -> dict[str, Any]:
        """Ray prints lines of its own."""
        assert self._owner is not None
        assert self._owner.stdout is not None
        async with asyncio.timeout(UP_S):
            while line := await self._owner.stdout.readline():
                if line.startswith(b"{"):
                    answer: dict[str, Any] = json.loads(line)
                    return answer
        raise RuntimeError(f"the Ray cluster has ended; see {self.folder / 'ray-nodes.log'}")

    async def baton(self, *arguments: str, timeout_s: float = UP_S) -> bytes:
        """What the command has printed. Raises RuntimeError when it fails."""
        command = [sys.executable, "-m", "baton", *arguments, "--address", self.address]
        with (self.folder / "commands.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self._variables(), **self.variables},
            )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), timeout_s)
        except BaseException:
            process.kill()
            raise
        if process.returncode:
            raise RuntimeError(f"baton {arguments[0]} ended with {process.returncode}; see {log.name}")
        return said

    def meet(self, news: dict[str, Any]) -> None:
        """Adopts a process that is not known yet."""
        known = self.members.get(news["id"])
        if known is None or known.pid != news["pid"]:
            self._adopt(news)

    def ends_with(self, member: Member) -> list[Member]:
        """Nobody ends with the control actor."""
        return [] if member.kind == "supervisor" else super().ends_with(member)

    def _supervisor(self) -> Member:
        log = self.disk.folder / "supervisor.log"
        return Control(SUPERVISOR, "supervisor", (), log, fleet=self)

    def _seen(self, workers: list[pb.WorkerStatus]) -> None:
        """The control actor tells nobody of a worker that its planner has started."""
        for one in workers:
            if one.worker_id not in self.members and one.state == "ready":
                self._meet_at(one.worker_id, f"{one.role}_worker", {"rpc": one.address})

    def _meet_at(self, name: str, process: str, addresses: dict[str, str]) -> None:
        """Adopts the process that listens there, whose pid the port tells."""
        for listening in psutil.net_connections("tcp"):
            address = f"{listening.laddr[0].removeprefix('::ffff:')}:{listening.laddr[1]}"  # gRPC listens with IPv6
            if address in addresses.values() and listening.status == psutil.CONN_LISTEN and listening.pid:
                self.meet({"id": name, "pid": listening.pid, "process": process, "addresses": addresses})

    async def _tend_adopted(self, member: Adopted) -> None:
        addresses = dict(member.addresses)
        await super()._tend_adopted(member)
        while member.kind == "router" and member.name not in self.members and not self._closing:
            self._meet_at(member.name, "router", addresses)  # the control actor starts it where it was
            await asyncio.sleep(POLL_S)


def _of_cluster(folder: str, name: str) -> list[psutil.Process]:
    """Processes of this cluster with that in their command lines."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = process.environ().get("RAY_TMPDIR") == folder
            if ours and name in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
