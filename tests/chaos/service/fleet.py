"""The processes of one scenario: started one by one, watched, and started again when a fault has ended them."""

import asyncio
import contextlib
import json
import secrets
import shutil
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import nats
import yaml
from nats.aio.client import Client as NatsConnection

from baton.service.local.nats_server import find_binary
from baton_proto.generated import inference_pb2 as pb
from runtime.calls.router import Client
from runtime.config.model_entry import model_namespace
from runtime.config.serving import ServingConfig
from runtime.processes.other_python import package_links
from runtime.security.cluster_key import NATS, OPERATOR, ClusterKey
from runtime.security.internal_tls import InternalTls
from runtime.security.nats_login import OWN_USER, NatsLogin
from runtime.security.secret import Secret
from tests.chaos.asking import Door
from tests.chaos.judging.files import left_in_folder, left_in_shared_memory, shared_memory
from tests.chaos.judging.timeline import Timeline
from tests.chaos.machine.clocks import Clock
from tests.chaos.machine.disk import Disk
from tests.chaos.machine.hosts import HERE, Host, NamespaceHost, UsualHost, network
from tests.chaos.machine.slots import ports
from tests.chaos.machine.wires import wired_hosts
from tests.chaos.service.member import Kind, Member
from tests.chaos.service.scenarios import Device, Scenario, merged
from tests.service import assert_gone
from tests.vllm.environment import vllm_python

POLL_S = 0.15  # between two questions to a router what it knows of its workers
STATUS_TIMEOUT_S = 2.0
STARTS_AT_ONCE = 2
STOP_TIMEOUT_S = 20.0
BASE: dict[str, Any] = {
    "router": {"http_port": 0, "grpc_port": 0, "no_worker_timeout_s": 3.0},
    "workers": {"ready_timeout_s": 80.0, "drain_timeout_s": 10.0},
    "logging": {"level": "info"},
}


def set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(eq=False)
class Fleet:
    """`problems`: what was wrong with a process itself, in words. `deaths`: lives that a fault has ended."""

    scenario: Scenario
    hosts: Sequence[Host]
    folder: Path
    model: str
    device: Device
    disk: Disk
    key: str = field(default_factory=lambda: secrets.token_hex(32))
    honest_key: str = field(default_factory=lambda: secrets.token_hex(32))
    strangers_key: str = field(default_factory=lambda: secrets.token_hex(32))
    members: dict[str, Member] = field(default_factory=dict)
    known: dict[str, Kind] = field(default_factory=dict)  # every member that there ever was
    serves: dict[str, str] = field(default_factory=dict)  # by worker its model's name, where there are several
    doors: dict[str, Door] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)
    problems: list[str] = field(default_factory=list)
    left_files: list[str] = field(default_factory=list)
    deaths: int = 0
    wakes: int = 0  # of models that slept
    strikes: int = 0  # begins and ends of faults
    whole_within_s: float = 60.0  # of the last fault
    hurry: bool = False  # whether the end is to come at once
    said: dict[str, dict[str, str]] = field(default_factory=dict)  # by router: of each worker its state or a note
    pids: set[int] = field(default_factory=set)
    quiet_bytes: dict[int, int] = field(default_factory=dict)  # by pid: its memory before the first attack
    under_attack: asyncio.Event = field(default_factory=set_event)  # or nobody is going to attack
    to_strangers: Counter[str] = field(default_factory=Counter)  # connections, and answers by their status
    most_more_bytes: int = 0  # than these, of any router or worker
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _closing: bool = False
    _shared_memory: set[str] = field(default_factory=shared_memory)
    _clients: list[Client] = field(default_factory=list)
    _starts: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(STARTS_AT_ONCE))

    @property
    def cluster(self) -> ClusterKey:
        return ClusterKey(Secret(self.key), "on" if self.scenario.secured else "off")

    def of(self, *kinds: Kind) -> list[Member]:
        return [member for member in self.members.values() if member.kind in kinds]

    def able(self, *kinds: Kind) -> list[Member]:
        """The members that every router that is up may use, or the routers that answer."""
        routers = [router.name for router in self.of("router") if self.timeline.able(router.name)]
        found = []
        for member in self.of(*kinds):
            pairs = [member.name] if member.kind == "router" else [pair(router, member.name) for router in routers]
            if pairs and all(self.timeline.able(name) for name in pairs):
                found.append(member)
        return found

    def lost(self, member: Member) -> None:
        """Notes that from now on an error of what depends on it is warranted."""
        now_s = time.monotonic()
        self.timeline.lost(member.name, now_s)
        for router in self.of("router"):
            if member.kind == "router":
                for worker in self.of("prefill", "decode"):
                    self.timeline.lost(pair(member.name, worker.name), now_s)
            else:
                self.timeline.lost(pair(router.name, member.name), now_s)

    def ends_with(self, member: Member) -> list[Member]:
        """Who ends when this member does."""
        return []

    async def start(self) -> None:
        self._add_members()
        await asyncio.gather(*(self._start(one) for one in self.of("nats")))
        await asyncio.gather(*(self._start(one) for one in list(self.members.values()) if one.kind != "nats"))
        self._go(self._watch())
        await self.until_whole()

    def complete(self) -> bool:
        kinds: tuple[Kind, ...] = ("router", "prefill", "decode")
        return len(self.able(*kinds)) == len(self.of(*kinds)) and all(one.ready for one in self.of("nats"))

    async def until_whole(self) -> None:
        """Waits until every process is up, and every router uses every worker. Raises TimeoutError with the missing
        ones."""
        deadline_s = time.monotonic() + self.whole_within_s
        kinds: tuple[Kind, ...] = ("router", "prefill", "decode")
        while not self.complete():
            if time.monotonic() > deadline_s:
                able = {member.name for member in self.able(*kinds)}
                missing = [
                    f"{one.name} (pid {one.pid}, life {one.lives}, ready {one.ready}, struck {one.struck}, "
                    f"routers say {[(router, said.get(one.name)) for router, said in self.said.items()]})"
                    for one in self.of(*kinds)
                    if one.name not in able
                ]
                raise TimeoutError(
                    f"{self.whole_within_s:.0f} s after the last fault not in use: {', '.join(missing) or 'somebody'}"
                    f"; there are {', '.join(self.members)}"
                )
            await asyncio.sleep(POLL_S / 3)

    async def until_useful(self) -> None:
        """Waits until there is a router, and a worker of each role: a round without them would teach nothing."""
        async with asyncio.timeout(30 + self.scenario.start_s):
            kinds: list[Kind] = ["router", "decode", *(["prefill"] if self.scenario.prefill else [])]  # type: ignore[list-item]
            while not all(self.able(kind) for kind in kinds):
                await asyncio.sleep(POLL_S / 3)

    async def close(self) -> None:
        """Ends everything: routers, workers, NATS."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self.members.values():
            self._note_pids(member)
        for kinds in (("supervisor",), ("router",), ("prefill", "decode"), ("nats",)):
            group = [member for member in self.of(*kinds) if member.alive]  # type: ignore[arg-type]
            if self.hurry:
                await asyncio.gather(*(member.kill() for member in group))
                continue
            clean = await asyncio.gather(*(member.stop(STOP_TIMEOUT_S) for member in group))
            self.problems += [
                f"{member.name} did not end in order, code {member.process and member.process.returncode}"
                for member, well in zip(group, clean, strict=True)
                if not well and member.kind != "nats"
            ]
        for client in self._clients:
            await client.close()
        assert_gone(self.pids)
        if not self.hurry:
            self.left_files = left_in_folder(self.disk.folder, max(one.started_s for one in self.members.values()))
            self.left_files += left_in_shared_memory(self._shared_memory)

    def _add_nats(self) -> str:
        """Returns its URL."""
        nats_host, port = self.hosts[0], free_port(self.hosts[0])
        command = [str(find_binary()), "--addr", nats_host.address, "--port", str(port)]
        command += ["--jetstream", "--store_dir", str(self.disk.folder / "nats")]
        if self.cluster.tls is not None:
            command += ["--config", str(self._nats_config(self.cluster.tls))]
        self._add("nats", "nats", command, nats_host)
        return f"{'tls' if self.scenario.secured else 'nats'}://{nats_host.address}:{port}"

    def _nats_config(self, tls: InternalTls) -> Path:
        files = {"ca_file": tls.authority, "cert_file": tls.pair().certificate, "key_file": tls.pair().key}
        for name, text in files.items():
            (self.folder / name).write_bytes(text)
        config = {name: str(self.folder / name) for name in files} | {"verify": True, "handshake_first": True}
        (self.folder / "nats.json").write_text(json.dumps({"tls": config}))
        return self.folder / "nats.json"

    async def connect_nats(self) -> NatsConnection:
        """Raises OSError, TimeoutError, nats.errors.Error."""
        tls = self.cluster.tls
        asks = bool(self.scenario.own_nats)
        login = NatsLogin(OWN_USER, self.cluster.derive(NATS), tls=tls) if asks else NatsLogin(tls=tls)
        options = login.options() | ({} if tls is None else {"tls": tls.client()})
        urls = [one.addresses["nats"] for one in self.of("nats") if one.ready]
        if not urls:
            raise ConnectionRefusedError
        return await nats.connect(urls[0], allow_reconnect=False, connect_timeout=2, **options)

    def store_of(self, server: Member) -> Path:
        """Of a NATS server."""
        folder = self.disk.folder / "nats"
        return folder / server.name if self.scenario.own_nats > 1 else folder

    def decode_and_all(self, router: str, model: str) -> tuple[list[str], list[str]]:
        """The decode workers, and all workers, of a model, as the router sees them; where nobody knows which router it
        is, as whichever does."""
        workers = {name: kind for name, kind in self.known.items() if kind in ("prefill", "decode")}
        roles = {name: kind for name, kind in workers.items() if self.serves.get(name, "") == model}
        seen = {name: name if self.scenario.shares_ports else pair(router, name) for name in roles}
        return [seen[name] for name, kind in roles.items() if kind == "decode"], [*seen.values()]

    def _add_members(self) -> None:
        url = self._add_nats()
        for number in range(self.scenario.routers):
            self._add_python(f"router-{number + 1}", "router", number, url)
        for kind, count in (("prefill", self.scenario.prefill), ("decode", self.scenario.decode)):
            for number, model in product(range(count), self.scenario.models or ("",)):
                name = f"{kind}-{model}-{number + 1}" if model else f"{kind}-{number + 1}"
                self.serves[name] = model
                self._add_python(name, kind, number + 1, url)  # type: ignore[arg-type]

    def _add_python(self, name: str, kind: Kind, place: int, nats_url: str) -> None:
        host = self.hosts[place % len(self.hosts)]
        config = merged(BASE, self.scenario.sections(self.device, self.disk.folder))
        section = "router" if kind == "router" else "workers"
        config = merged(config, {"nats": {"url": nats_url}, section: {"host": host.address}})
        config = merged(config, self._of_models(self.serves.get(name, "")), self._of_generation(name))
        if self.scenario.keys:
            config = merged(config, {"security": {"api_key_file": str(self._key_file())}})
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        module, flag = ("router", "--router-id") if kind == "router" else (f"{kind}_worker", "--worker-id")
        self._add(name, kind, [module, "--config", str(path), flag, name], host)

    def _of_models(self, name: str) -> dict[str, Any]:
        """Sections that name the models, or the worker's one of several, whose folders lie side by side."""
        if not self.scenario.models:
            return {"model": self.model}
        folders = {one: str(Path(self.model).with_name(one)) for one in self.scenario.models}
        if not name:
            return {"models": [{"name": one, "model": folder} for one, folder in folders.items()]}
        namespace = model_namespace(ServingConfig().namespace, name)
        return {"model": folders[name], "served_model_name": name, "namespace": namespace}

    def _of_generation(self, name: str) -> dict[str, Any]:
        """Sections that the member has and others have not."""
        return {}

    def _key_file(self) -> Path:
        """The file with the keys of those who may ask."""
        file = self.folder / "keys"
        file.touch(mode=0o600)
        file.write_text(f"{self.honest_key}\n{self.strangers_key}\n")
        return file

    def _add(self, name: str, kind: Kind, command: list[str], host: Host) -> None:
        variables = self._variables()
        clock = Clock(self.folder, name) if self.scenario.clocks and kind != "nats" else None
        variables |= {} if clock is None else clock.variables
        member = Member(name, kind, command, self.disk.folder / f"{name}.log", host, variables, clock)
        if self.scenario.engine == "vllm" and kind in ("prefill", "decode"):
            member.python, member.ready_timeout_s = vllm_python(), self.scenario.start_s
            temporary = self.folder / f"{name}-tmp"  # of its own, because a killed vLLM leaves files there
            temporary.mkdir()
            links = package_links(self.folder)
            member.variables = variables | {"PYTHONPATH": str(links), "TMPDIR": str(temporary)}
        self.members[name] = member
        self.known[name] = kind

    def _variables(self) -> dict[str, str]:
        return {"BATON_CLUSTER_KEY": self.key, "TMPDIR": str(self.disk.folder)}

    async def _start(self, member: Member) -> None:
        await member.start()
        self._note_pids(member)
        self._open_door(member)
        self._go(self._tend(member))

    def _open_door(self, member: Member) -> None:
        if member.kind == "router":
            host, _, port = member.addresses["http"].rpartition(":")
            key = self.honest_key if self.scenario.keys else ""
            client = Client(
                member.addresses["grpc"], Secret(key) if key else None, operator_key=self.cluster.derive(OPERATOR)
            )
            self._clients.append(client)  # an earlier one stays open, because closing it would cancel its calls
            self.doors[member.name] = Door(member.name, client, (host, int(port)), Path(self.model).name, key)

    async def _tend(self, member: Member) -> None:
        """Waits until this life ends, and begins the next one."""
        code = await member.ended()
        if self._closing:
            return
        member.addresses = {}
        if not (member.expected_end or member.may_end):
            self.problems.append(f"{member.name} ended unasked with code {code} (struck: {member.struck})")
        self.lost(member)  # which says who is to end with it
        self.deaths += 1
        if member.retired:
            del self.members[member.name]
            return
        while member.held_down:
            await asyncio.sleep(0.02)
        # NATS does not wait for its turn, because the others' starts wait for NATS.
        async with contextlib.nullcontext() if member.kind == "nats" else self._starts:
            try:
                await self._start(member)
            except (RuntimeError, TimeoutError) as error:
                self.problems.append(f"{member.name} did not start again: {error!r}")

    async def _watch(self) -> None:
        """Asks each router that no fault has struck what it knows of the workers. Both are able again when two answers
        in a row say so."""
        before: dict[str, set[str]] = {}
        while True:
            for router in self.of("router"):
                ready: set[str] = set()
                if router.ready and not router.struck:
                    try:
                        status = await self.doors[router.name].grpc.status(STATUS_TIMEOUT_S)
                    except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
                        self.said[router.name] = {router.name: str(error)}
                    else:
                        self._seen(list(status.workers))
                        self.said[router.name] = {one.worker_id: one.note or one.state for one in status.workers}
                        ready = {one.worker_id for one in status.workers if self.serving(one)}
                        if self.scenario.shares_ports and status.router_id != router.name:
                            self._open_door(router)  # until the system gives us a connection to this one
                        elif router.ready and not router.struck and not router.expected_end:
                            self._mark(router.name, ready & before.get(router.name, set()))
                before[router.name] = ready
            await asyncio.sleep(POLL_S)

    def serving(self, worker: pb.WorkerStatus) -> bool:
        """Whether requests for its model are answered because of it."""
        return worker.used

    def _seen(self, workers: list[pb.WorkerStatus]) -> None:
        """Hears what a router knows."""

    def _mark(self, router: str, ready: set[str]) -> None:
        now_s = time.monotonic()
        self.timeline.back(router, now_s)
        for worker_id in ready:
            worker = self.members.get(worker_id)
            if worker and worker.ready and not worker.struck and not worker.expected_end:
                self.timeline.back(pair(router, worker_id), now_s)
                self.timeline.back(worker_id, now_s)

    def _note_pids(self, member: Member) -> None:
        if member.alive:
            self.pids |= set(member.pids())

    def _go(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._closing and (task.cancelled() or task.exception() is not None):
            self.problems.append(f"a task of tests/chaos itself has failed: {task!r}")


def pair(router: str, worker: str) -> str:
    """The timeline's name of a worker as this router sees it."""
    return f"{router}>{worker}"


def free_port(host: Host) -> int:
    """A port of the host; in a namespace of its own any is free."""
    if isinstance(host, NamespaceHost):
        return 4222
    for port in ports():
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host.address, port))
            return port
    raise RuntimeError(f"none of the ports {ports()} is free")


def kind_of_fleet(scenario: Scenario) -> type[Fleet]:
    if scenario.ray:
        from tests.chaos.service.ray import RayFleet

        return RayFleet
    if scenario.rolls:
        from tests.chaos.service.rolling import RollingFleet

        return RollingFleet
    if scenario.asleep:
        from tests.chaos.service.sleeping import SleepingFleet

        return SleepingFleet
    if scenario.planner:
        from tests.chaos.service.up import UpFleet

        return UpFleet
    return Fleet


@asynccontextmanager
async def running_fleet(scenario: Scenario, folder: Path, model: str, device: Device) -> AsyncIterator[Fleet]:
    """`folder`: for configuration, logs and NATS; it is kept."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    async with AsyncExitStack() as stack:
        hosts: Sequence[Host] = [HERE]
        if scenario.hostile:
            hosts = [UsualHost()]
        elif scenario.network == "namespaces":
            hosts = stack.enter_context(network(scenario.hosts))
        elif scenario.network == "wires":
            hosts = await stack.enter_async_context(wired_hosts(scenario.hosts, folder))
        disk = stack.enter_context(Disk(folder / "disk"))
        fleet = kind_of_fleet(scenario)(scenario, hosts, folder, model, device, disk)
        fleet.whole_within_s = max(fleet.whole_within_s, scenario.start_s)
        stack.push_async_callback(fleet.close)
        try:
            await fleet.start()
            yield fleet
        except BaseException:
            fleet.hurry = True
            raise
