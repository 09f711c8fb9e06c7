"""A whole service: NATS, the router and the workers, started in order and ended in order.

`baton up`, `baton demo` and tests use it. Where the processes run is the launcher's business: on this machine or on a
Ray cluster. Nothing is restarted silently: a process that ends without having been told to is reported by `wait`, and
what follows from it is the caller's decision.
"""

import asyncio
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import grpc
import msgspec

from baton.service.launcher import Launch, Launcher, Role
from baton.service.local_launcher import LocalLauncher
from baton.service.nats_server import NATS
from runtime.calls.router import Client
from runtime.checkpoint.served_model import is_mock
from runtime.config.serving import ServingConfig, for_prefill_worker
from runtime.errors import ConfigError, UnavailableError
from runtime.processes.process import Process, ProcessExit, ProcessFailedError, Ready
from runtime.security.key_file import key_left
from runtime.security.keys import handed_on, load_keys, load_or_make_keys
from runtime.security.nats_login import split_url
from runtime.security.tls import load_tls

ROUTER_ID = "router-1"
READY = "ready"  # a worker's state, with nothing else to say of it
DRAIN_GRACE_S = 5.0  # beyond the drain limit that a process keeps itself, before it is killed
ROUTER_POLL_S = 0.05


class Supervisor:
    """`launcher`: None: a LocalLauncher, with `log_dir`. `on_ready` is called for each process. Raises ConfigError when
    keys or certificates cannot be used."""

    def __init__(
        self,
        config: ServingConfig,
        log_dir: Path | None = None,
        on_ready: Callable[[Ready], None] | None = None,
        launcher: Launcher | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.keys = load_or_make_keys(config, environ)
        self._environ = environ
        self._tls = load_tls(config.security)
        self.config = _without_login(config)
        self.launcher: Launcher = launcher or LocalLauncher(config, log_dir)
        self.children: dict[str, Process] = {}  # by router or worker id, in the order of their start
        self.ready: dict[str, Ready] = {}
        self.nats: Process | None = None
        self._on_ready = on_ready or (lambda ready: None)
        self._process_of: dict[str, str] = {}  # worker id -> name of the child that it lives in
        self._roles: dict[str, Role] = {}  # by worker id
        self._numbers = defaultdict[str, Iterator[int]](lambda: itertools.count(1))  # of the next worker or process
        self._watchers: set[asyncio.Task[None]] = set()
        self._closing = ExitStack()  # after all processes have ended
        self._exits: asyncio.Queue[ProcessExit] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Returns when every process is ready and the router uses every worker. Takes over those that an earlier
        supervisor has left behind, and starts what is missing.

        Raises ProcessFailedError, or UnavailableError when NATS does not start, having ended what it had started. When
        it had taken over some, all stay as they are. Raises ConfigError when those have another configuration.
        """
        living: list[tuple[Launch, Process]] = []
        try:
            living = await self.launcher.living()
            for launch, _ in living:
                self._check_alike(launch)
            self.take_over(living)
            await self._start_nats()
            self._leave_key()
            async with asyncio.TaskGroup() as group:
                for name, process in self.children.items():
                    group.create_task(self._until_ready(name, process))
                for launch in self._missing():
                    group.create_task(self._start(launch))
            await self.until_used([*self.workers("prefill"), *self.workers("decode")])
        except BaseException as error:
            if not living:
                await self.kill()
                await self.stop()
            if isinstance(error, ExceptionGroup):
                raise error.exceptions[0] from None
            raise

    def take_over(self, living: Iterable[tuple[Launch, Process]]) -> None:
        """Processes of an earlier supervisor, and the keys that they know each other by: they are ours from now on."""
        for launch, process in living:
            self._environ = launch.keys
            self.keys = load_keys(launch.config, launch.keys)
            if launch.module == NATS:
                self.nats = process
            else:
                self._add(launch, process)
            self._watch_in_background(process)

    async def add_worker(self, role: Role, worker_id: str | None = None) -> str:
        """Its id, once the router uses it. `worker_id`: of no worker that lives. Raises ProcessFailedError; when it was
        too slow, its process lives on."""
        launch = self._worker(role, worker_id or self._new_id(role))
        (worker_id,) = launch.workers
        await self._start(launch)
        await self.until_used([worker_id])
        return worker_id

    async def stop_worker(self, worker_id: str) -> bool:
        """Drains it, with those that share its process. False when it did not end in order, or not in time, and had to
        be killed."""
        return await self.children[self._process_of[worker_id]].stop(self._stop_limit_s)

    async def kill_worker(self, worker_id: str) -> None:
        await self.children[self._process_of[worker_id]].kill()

    async def wait(self) -> ProcessExit:
        """The next child that ends without having been told to."""
        return await self._exits.get()

    async def stop(self) -> bool:
        """Drains and ends everything: first the router, whose requests need the workers, then those, then NATS.

        False when something did not end in order, or had to be killed. May be called again.
        """
        routers = [child for name, child in self.children.items() if name == ROUTER_ID]
        workers = [child for name, child in self.children.items() if name != ROUTER_ID]
        for child in self.children.values():
            child.stopping = True
        clean = True
        for group in (routers, workers):
            clean &= all(await asyncio.gather(*(child.stop(self._stop_limit_s) for child in group)))
        if self.nats is not None:
            nats, self.nats = self.nats, None
            await nats.stop(self._stop_limit_s)
        self._closing.close()
        await asyncio.gather(*self._watchers)
        self.launcher.close()
        return clean

    async def kill(self) -> None:
        """Ends the router and the workers now, whatever they are doing."""
        await asyncio.gather(*(child.kill() for child in self.children.values() if child.alive))

    def address(self, name: Literal["grpc", "http"]) -> str:
        """HOST:PORT of an endpoint of the router."""
        return self.ready[ROUTER_ID].addresses[name]

    @property
    def speaks_tls(self) -> bool:
        return self._tls is not None

    def client(self) -> Client:
        """Of the router. It trusts the very certificate that the router was given, whatever that is called."""
        tls = self._tls
        ca, name = (None, None) if tls is None else (tls.certificate, tls.name)
        return Client(self.address("grpc"), None if self.keys.api is None else self.keys.api.first(), ca, name)

    def workers(self, role: Role) -> list[str]:
        """Ids of the workers whose processes live."""
        return [name for name, its in self._roles.items() if its == role and self.process(name) is not None]

    def has_started(self, worker_id: str) -> bool:
        """Whether it was ever a worker of this service."""
        return worker_id in self._roles

    def process(self, worker_id: str) -> Process | None:
        """The worker's, while it lives."""
        child = self.children.get(self._process_of.get(worker_id, ""))
        return child if child is not None and child.alive else None

    @property
    def _workers_per_process(self) -> int:
        workers = self.config.workers
        if self.config.planner.enabled:
            return 1  # it ends them one by one
        return workers.per_process or (max(1, workers.prefill + workers.decode) if is_mock(self.config) else 1)

    @property
    def _stop_limit_s(self) -> float:
        return self.config.workers.drain_timeout_s + DRAIN_GRACE_S

    def _check_alike(self, launch: Launch) -> None:
        """Raises ConfigError when a process that lives was started with another configuration, but for what may change
        from one supervisor to the next."""
        ours, theirs = msgspec.to_builtins(self.config), msgspec.to_builtins(launch.config)
        for key in ours.keys() - {"nats", "workers", "planner", "ray", "logging"}:
            if ours[key] != theirs[key]:
                raise ConfigError(key, f"{launch.name} lives, and was started with another one; end the service first")

    async def _start_nats(self) -> None:
        """Unless it is there, or another one is to be used. Raises UnavailableError."""
        if self.config.nats.url is not None:
            return
        if self.nats is None:
            if self.children:
                raise UnavailableError("processes of this service live, but their NATS server does not; end them first")
            self.nats = self.launcher.process(self._launch(NATS, NATS, []))
            await self._begin(self.nats)
        ready = await self.nats.wait_ready(self.config.workers.ready_timeout_s)
        nats = msgspec.structs.replace(self.config.nats, url=ready.addresses[NATS])
        self.config = msgspec.structs.replace(self.config, nats=nats)
        self._on_ready(ready)

    def _missing(self) -> Iterator[Launch]:
        """What the configuration asks for and is not there yet. A planner that was at work before knows better how many
        workers there should be."""
        if ROUTER_ID not in self.children:
            yield self._launch(ROUTER_ID, "router", ["--router-id", ROUTER_ID])
        if self._roles and self.config.planner.enabled:
            return
        wanted: dict[Role, int] = {"prefill": self.config.workers.prefill, "decode": self.config.workers.decode}
        roles = [role for role, count in wanted.items() for _ in range(count - len(self.workers(role)))]
        if self._workers_per_process == 1:
            yield from (self._worker(role, self._new_id(role)) for role in roles)
        else:
            yield from (self._many(some) for some in batched(roles, self._workers_per_process))

    def _leave_key(self) -> None:
        """For commands on this machine."""
        assert self.config.nats.url is not None
        assert self.keys.cluster is not None
        self._closing.enter_context(key_left(self.config.nats.url, self.config.namespace, self.keys.cluster))

    def _worker(self, role: Role, worker_id: str) -> Launch:
        ranks = (for_prefill_worker(self.config) if role == "prefill" else self.config).engine.tensor_parallel
        return self._launch(worker_id, f"{role}_worker", ["--worker-id", worker_id], {worker_id: role}, ranks)

    def _many(self, roles: Sequence[Role]) -> Launch:
        """All in one process."""
        workers = {self._new_id(role): role for role in roles}
        name = self._new_id("workers")
        return self._launch(name, "baton.service.many_workers", ["--name", name, *workers], workers, 1)

    def _launch(
        self, name: str, module: str, arguments: list[str], workers: dict[str, Role] | None = None, ranks: int = 0
    ) -> Launch:
        keys = handed_on(self.keys, self._environ)
        return Launch(name, module, self.config, arguments, workers or {}, ranks, keys)

    def _new_id(self, kind: str) -> str:
        taken = self._roles.keys() | self.children.keys()
        return next(name for number in self._numbers[kind] if (name := f"{kind}-{number}") not in taken)

    async def _start(self, launch: Launch) -> None:
        process = self.launcher.process(launch)
        self._add(launch, process)
        await self._begin(process)
        await self._until_ready(launch.name, process)

    async def _begin(self, process: Process) -> None:
        try:
            await process.start()
        except BaseException:
            self.launcher.release(process)
            raise
        self._watch_in_background(process)

    def _add(self, launch: Launch, process: Process) -> None:
        self.children[launch.name] = process
        self._roles |= launch.workers
        self._process_of |= dict.fromkeys(launch.workers, launch.name)

    async def _until_ready(self, name: str, process: Process) -> None:
        self.ready[name] = await process.wait_ready(self.config.workers.ready_timeout_s)
        self._on_ready(self.ready[name])

    async def until_used(self, worker_ids: Iterable[str]) -> None:
        """A worker takes requests once the router has heard of it and has connected to it."""
        deadline_s = time.monotonic() + self.config.workers.ready_timeout_s
        states = dict.fromkeys(worker_ids, "it does not know it")
        async with self.client() as client:
            while any(state != READY for state in states.values()):
                await asyncio.sleep(ROUTER_POLL_S)
                for worker_id, state in states.items():
                    if state != READY and not (self.process(worker_id) is not None and time.monotonic() < deadline_s):
                        raise ProcessFailedError(worker_id, f"is not used by the router: {state}", "")
                try:
                    known = (await client.status(self.config.workers.ready_timeout_s)).workers
                except grpc.aio.AioRpcError as error:
                    raise ProcessFailedError(ROUTER_ID, f"does not answer: {error.details()}", "") from error
                states |= {
                    worker.worker_id: worker.note or worker.state for worker in known if worker.worker_id in states
                }

    def _watch_in_background(self, process: Process) -> None:
        watcher = asyncio.create_task(self._watch(process))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch(self, process: Process) -> None:
        ended = await process.wait()
        self.launcher.release(process)
        if process.was_ready and not process.stopping:  # for one that never was, its start has raised
            self._exits.put_nowait(ended)


def _without_login(config: ServingConfig) -> ServingConfig:
    """What may be written down: a login in the URL of NATS goes to the processes as variables."""
    if config.nats.url is None:
        return config
    nats = msgspec.structs.replace(config.nats, url=split_url(config.nats.url)[0])
    return msgspec.structs.replace(config, nats=nats)


def batched(roles: Sequence[Role], size: int) -> Iterator[Sequence[Role]]:
    """As itertools.batched, which Python 3.11 lacks."""
    return (roles[start : start + size] for start in range(0, len(roles), size))
