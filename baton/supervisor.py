"""A whole service on one machine: NATS, the router and the workers as child processes.

`baton up`, `baton demo` and tests use it. Nothing is restarted silently: a child that ends without having been told to
is reported by `wait`, and what follows from it is the caller's decision.
"""

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import grpc
import msgspec

from baton.child_process import ChildExit, ChildFailedError, ChildProcess, Ready, environment
from baton.client import Client
from baton.config import ServingConfig, dump_config, for_prefill_worker
from baton.gpu_places import GpuPlaces, visible_gpus
from baton.nats_server import NatsServer
from baton.security.key_file import key_left
from baton.security.keys import handed_on, load_or_make_keys
from baton.security.nats_login import split_url
from baton.security.tls import load_tls
from engine.served_model import is_mock

Role = Literal["prefill", "decode"]

ROUTER_ID = "router-1"
READY = "ready"  # a worker's state, with nothing else to say of it
DRAIN_GRACE_S = 5.0  # beyond the drain limit that a process keeps itself, before it is killed
NATS_POLL_S = 0.3
ROUTER_POLL_S = 0.05


class Supervisor:
    """`log_dir`: one file per process; None: all write to our own stderr. `on_ready` is called for each process. Raises
    ConfigError when keys or certificates cannot be used.

    Use from the main thread only (see ChildProcess).
    """

    def __init__(
        self, config: ServingConfig, log_dir: Path | None = None, on_ready: Callable[[Ready], None] | None = None
    ) -> None:
        self.keys = load_or_make_keys(config)
        self._tls = load_tls(config.security)
        self.config = _without_login(config)
        self.children: dict[str, ChildProcess] = {}  # by router or worker id, in the order of their start
        self.ready: dict[str, Ready] = {}
        self.nats: NatsServer | None = None
        self._log_dir = log_dir
        self._on_ready = on_ready or (lambda ready: None)
        ranks = [self._ranks(role) for role in self._wanted()]
        self._gpus = GpuPlaces(visible_gpus() if config.engine.device != "cpu" else [], ranks)
        self._threads = config.engine.threads or _threads_per_rank(sum(ranks))
        self._started = {"prefill": 0, "decode": 0}
        self._process_of: dict[str, str] = {}  # worker id -> name of the child that it lives in
        self._roles: dict[str, Role] = {}  # by worker id
        self._folder: Path | None = None
        self._watchers: set[asyncio.Task[None]] = set()
        self._closing = ExitStack()  # after all processes have ended
        self._exits: asyncio.Queue[ChildExit] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Returns when every process is ready and the router uses every worker.

        Raises ChildFailedError, or UnavailableError when NATS does not start, having ended what it had started.
        """
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="baton-"))
            await self._start_nats()
            self._leave_key()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._start_router())
                if self._workers_per_process == 1:
                    for role in self._wanted():
                        group.create_task(self._start_worker(role))
                else:
                    for number, roles in enumerate(batched(self._wanted(), self._workers_per_process), 1):
                        group.create_task(self._start_workers(f"workers-{number}", roles))
            await self.until_used([*self.workers("prefill"), *self.workers("decode")])
        except BaseException as error:
            await self.kill()
            await self.stop()
            if isinstance(error, ExceptionGroup):
                raise error.exceptions[0] from None
            raise

    async def add_worker(self, role: Role, worker_id: str | None = None) -> str:
        """Its id, once the router uses it. `worker_id`: of no worker that lives. Raises ChildFailedError; when it was
        too slow, its process lives on."""
        worker_id = await self._start_worker(role, worker_id)
        await self.until_used([worker_id])
        return worker_id

    async def stop_worker(self, worker_id: str) -> bool:
        """Drains it, with those that share its process. False when it did not end in order, or not in time, and had to
        be killed."""
        return await self.children[self._process_of[worker_id]].stop(self._stop_limit_s)

    async def kill_worker(self, worker_id: str) -> None:
        await self.children[self._process_of[worker_id]].kill()

    async def wait(self) -> ChildExit:
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
            await nats.stop()
        self._closing.close()
        await asyncio.gather(*self._watchers)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        return clean

    async def kill(self) -> None:
        """Ends the router and the workers now, whatever they are doing."""
        for child in self.children.values():
            child.stopping = True
            child.send_signal(signal.SIGKILL)
        await asyncio.gather(*(child.wait() for child in self.children.values()))

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

    def process(self, worker_id: str) -> ChildProcess | None:
        """The worker's, while it lives."""
        child = self.children.get(self._process_of.get(worker_id, ""))
        return child if child is not None and child.alive else None

    def _wanted(self) -> list[Role]:
        """The role of each worker that the configuration asks for."""
        roles: list[Role] = ["prefill"] * self.config.workers.prefill
        return roles + ["decode"] * self.config.workers.decode

    def _ranks(self, role: Role) -> int:
        """Of one worker."""
        config = for_prefill_worker(self.config) if role == "prefill" else self.config
        return config.engine.tensor_parallel

    @property
    def _workers_per_process(self) -> int:
        workers = self.config.workers
        if self.config.planner.enabled:
            return 1  # it ends them one by one
        return workers.per_process or (max(1, workers.prefill + workers.decode) if is_mock(self.config) else 1)

    @property
    def _stop_limit_s(self) -> float:
        return self.config.workers.drain_timeout_s + DRAIN_GRACE_S

    async def _start_nats(self) -> None:
        if self.config.nats.url is not None:
            return
        assert self._folder is not None
        store_dir = Path(self.config.nats.store_dir) if self.config.nats.store_dir else self._folder / "nats"
        self.nats = NatsServer(store_dir=store_dir, login=self.keys.nats)
        await self.nats.start()
        self.config = msgspec.structs.replace(
            self.config, nats=msgspec.structs.replace(self.config.nats, url=self.nats.url)
        )
        self._watch_in_background(self._watch_nats(self.nats))
        self._on_ready(Ready("nats", "nats", self.nats.pid, {"nats": self.nats.url}))

    def _leave_key(self) -> None:
        """For commands on this machine."""
        assert self.config.nats.url is not None
        assert self.keys.cluster is not None
        self._closing.enter_context(key_left(self.config.nats.url, self.config.namespace, self.keys.cluster))

    async def _start_router(self) -> None:
        await self._start_child(
            ROUTER_ID, "router", ["--config", str(self._write_config()), "--router-id", ROUTER_ID], 1
        )

    async def _start_worker(self, role: Role, worker_id: str | None = None) -> str:
        worker_id = self._new_worker(role, worker_id)
        arguments = ["--config", str(self._write_config()), "--worker-id", worker_id]
        place = self._gpus.next(self._ranks(role))
        await self._start_child(worker_id, f"{role}_worker", arguments, self._threads, place)
        return worker_id

    async def _start_workers(self, name: str, roles: Sequence[Role]) -> None:
        """All in one process."""
        worker_ids = [self._new_worker(role, process=name) for role in roles]
        arguments = ["--config", str(self._write_config()), "--name", name, *worker_ids]
        await self._start_child(name, "baton.worker.many", arguments, self._threads, self._gpus.next(1))

    def _new_worker(self, role: Role, worker_id: str | None = None, process: str | None = None) -> str:
        if worker_id is None:
            self._started[role] += 1
            worker_id = f"{role}-{self._started[role]}"
        self._process_of[worker_id] = process or worker_id
        self._roles[worker_id] = role
        return worker_id

    async def until_used(self, worker_ids: Iterable[str]) -> None:
        """A worker takes requests once the router has heard of it and has connected to it."""
        deadline_s = time.monotonic() + self.config.workers.ready_timeout_s
        states = dict.fromkeys(worker_ids, "it does not know it")
        async with self.client() as client:
            while any(state != READY for state in states.values()):
                await asyncio.sleep(ROUTER_POLL_S)
                for worker_id, state in states.items():
                    if state != READY and not (self.process(worker_id) is not None and time.monotonic() < deadline_s):
                        raise ChildFailedError(worker_id, f"is not used by the router: {state}", "")
                try:
                    known = (await client.status(self.config.workers.ready_timeout_s)).workers
                except grpc.aio.AioRpcError as error:
                    raise ChildFailedError(ROUTER_ID, f"does not answer: {error.details()}", "") from error
                states |= {
                    worker.worker_id: worker.note or worker.state for worker in known if worker.worker_id in states
                }

    async def _start_child(
        self, name: str, module: str, arguments: list[str], threads: int, place: dict[str, str] | None = None
    ) -> None:
        log_file = self._log_dir / f"{name}.log" if self._log_dir is not None else None
        variables = environment(threads) | handed_on(self.keys) | (place or {})
        variables |= {"TMPDIR": str(self._folder)}  # what a killed child leaves, `stop` removes
        child = ChildProcess(name, module, arguments, variables, log_file)
        try:
            await child.start()
        except BaseException:
            self._gpus.give_back(place or {})
            raise
        self.children[name] = child
        self._watch_in_background(self._watch(child, place or {}))
        self.ready[name] = await child.wait_ready(self.config.workers.ready_timeout_s)
        self._on_ready(self.ready[name])

    def _watch_in_background(self, watch: Coroutine[None, None, None]) -> None:
        watcher = asyncio.create_task(watch)
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _watch_nats(self, nats: NatsServer) -> None:
        pid = nats.pid
        while nats.alive:
            await asyncio.sleep(NATS_POLL_S)
        if self.nats is nats:  # `stop` lets go of it first
            self._exits.put_nowait(ChildExit("nats", pid, None))

    async def _watch(self, child: ChildProcess, place: dict[str, str]) -> None:
        ended = await child.wait()
        self._gpus.give_back(place)
        if child.was_ready and not child.stopping:  # for one that never was, its start has raised
            self._exits.put_nowait(ended)

    def _write_config(self) -> Path:
        """What the children read: our configuration with the NATS address, threads and share of a GPU filled in."""
        assert self._folder is not None, "not started"
        path = self._folder / "serving.yaml"
        if not path.exists():
            share = max(self.config.engine.gpu_share, self._gpus.share)
            engine = msgspec.structs.replace(self.config.engine, threads=self._threads, gpu_share=share)
            path.write_text(dump_config(msgspec.structs.replace(self.config, engine=engine)))
        return path


def _without_login(config: ServingConfig) -> ServingConfig:
    """What may be written down: a login in the URL of NATS goes to the children as variables."""
    if config.nats.url is None:
        return config
    nats = msgspec.structs.replace(config.nats, url=split_url(config.nats.url)[0])
    return msgspec.structs.replace(config, nats=nats)


def _threads_per_rank(ranks: int) -> int:
    """Of all workers."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, ranks))


def batched(roles: Sequence[Role], size: int) -> Iterator[Sequence[Role]]:
    """As itertools.batched, which Python 3.11 lacks."""
    return (roles[start : start + size] for start in range(0, len(roles), size))
