"""The processes of one service, and which worker lives in which of them."""

import asyncio
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator

from baton.service.launcher import ROUTER, Launch
from baton_proto.planner import Role
from runtime.config.workers import WorkerEngine
from runtime.processes.process import Process, ProcessExit


class Children(dict[str, Process]):
    """The routers and the processes of the workers, by name, in the order of their start. One that has ended stays
    here, so that no name is given twice."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: dict[str, Launch] = {}  # by name
        self._launches: dict[str, Launch] = {}  # by worker id
        self.starting: set[str] = set()  # names of processes that have been added, and do not live yet
        self.stopped: set[str] = set()  # names of those that were told to end, or have been replaced
        self.places: dict[str, Collection[str]] = {}  # GPUs that each has or had, by name
        self._numbers = defaultdict[str, Iterator[int]](lambda: itertools.count(1))  # of the next worker or process

    def add(self, launch: Launch, process: Process) -> None:
        self[launch.name], self.launches[launch.name] = process, launch
        self._launches |= dict.fromkeys(launch.workers, launch)

    def new_id(self, kind: str) -> str:
        taken = self._launches.keys() | self.keys()
        return next(name for number in self._numbers[kind] if (name := f"{kind}-{number}") not in taken)

    @property
    def routers(self) -> list[str]:
        """Those that live and are not told to end."""
        return [name for name in self.living_of(ROUTER) if not self[name].stopping]

    def living_of(self, module: str = "") -> list[str]:
        """The processes that live; with a module: those of it."""
        return [name for name, launch in self.launches.items() if self[name].alive and module in ("", launch.module)]

    @property
    def had_workers(self) -> bool:
        return bool(self._launches)

    def has_started(self, worker_id: str) -> bool:
        """Whether it was ever a worker of this service."""
        return worker_id in self._launches

    def workers(self, role: Role, namespace: str | None = None) -> list[str]:
        """Ids of the workers whose processes live. `namespace`: of their model; None: of all."""
        return [
            name
            for name, launch in self._launches.items()
            if launch.workers[name] == role
            and namespace in (None, launch.config.namespace)
            and self.living(name) is not None
        ]

    def engines(self, role: Role, namespace: str | None = None) -> Counter[WorkerEngine]:
        """Counts the role's workers by engine, those that are being started included. `namespace`: of their model;
        None: of all."""
        ours = [
            (name, launch.name)
            for name, launch in self._launches.items()
            if launch.workers[name] == role and namespace in (None, launch.config.namespace)
        ]
        there = (name for name, process in ours if process in self.starting or self.living(name) is not None)
        return Counter(engine for engine in map(self.engine, there) if engine is not None)

    def engine(self, worker_id: str) -> WorkerEngine | None:
        """What computes in a worker that has started; None: an engine that somebody else started."""
        config = self._launches[worker_id].config
        return None if config.external_worker(worker_id) else config.workers.engine

    def namespace(self, worker_id: str) -> str:
        """Of the model of a worker that has started."""
        return self._launches[worker_id].config.namespace

    def of_worker(self, worker_id: str) -> Process:
        """The process of a worker that has started."""
        return self[self._launches[worker_id].name]

    def lost(self, namespace: str) -> list[str]:
        """Processes of a model's workers that have ended without having been told to, or did not become ready."""
        told = self.stopped | self.starting
        ours = [name for name, one in self.launches.items() if one.workers and one.config.namespace == namespace]
        return [name for name in ours if name not in told and not self[name].alive]

    def living(self, worker_id: str) -> Process | None:
        """The worker's process, while it lives."""
        launch = self._launches.get(worker_id)
        child = None if launch is None else self[launch.name]
        return child if child is not None and child.alive else None


class Endings:
    """Watches processes until they end. `release` is called for each one that has ended."""

    def __init__(self, release: Callable[[Process], None]) -> None:
        self._release = release
        self._watchers: set[asyncio.Task[None]] = set()
        self._exits: asyncio.Queue[ProcessExit] = asyncio.Queue()

    def watch(self, process: Process) -> None:
        watcher = asyncio.create_task(self._watch(process))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def unexpected(self) -> ProcessExit:
        """The next process that ends without having been told to."""
        return await self._exits.get()

    async def all(self) -> None:
        await asyncio.gather(*self._watchers)

    async def _watch(self, process: Process) -> None:
        ended = await process.wait()
        self._release(process)
        if process.was_ready and not process.stopping:  # for one that never was ready, its start has raised
            self._exits.put_nowait(ended)
