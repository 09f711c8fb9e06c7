"""A whole service: NATS, the routers and the workers, started in order and ended in order.

Where the processes run is the launcher's business: on this machine or on a Ray cluster. Nothing is restarted silently:
a process that ends without having been told to is reported by `wait`, and the caller decides what follows from it.
Routers and NATS can be started again where they were.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Literal, Self

import msgspec

from baton.runs.run_file import OwnRun
from baton.service.children import Children, Endings
from baton.service.launcher import NATS, ROUTER, Generation, Launch, Launcher
from baton.service.launches import Launches, check_alike, configs_for, nats_names, with_nats_url, without_login
from baton.service.local.local_launcher import LocalLauncher
from baton.service.until_used import until_used
from baton_proto.planner import Role
from runtime.calls.router import Client
from runtime.calls.worker import WorkerClient
from runtime.config.models import models_of, sleeping_namespaces
from runtime.config.serving import ServingConfig
from runtime.config.surroundings import LogLevel
from runtime.discovery.living_names import living_names, living_routers
from runtime.end_task import run_all
from runtime.errors import ConfigError, UnavailableError, WorkerLostError
from runtime.nats.client import connect
from runtime.processes.ports import check_router_ports
from runtime.processes.process import Process, ProcessExit, ProcessFailedError, Ready
from runtime.security.keys import handed_on, load_keys, load_or_make_keys
from runtime.security.nats_login import each_url
from runtime.security.tls import load_tls
from runtime.telemetry.logging import set_level

NATS_TIMEOUT_S = 10.0  # for a server that is not ours
SLEEP_LEVEL = 1  # the weights stay in host memory: what sleeps is kept for a burst
DRAIN_GRACE_S = 5.0  # beyond the drain limit that a process keeps itself, before it is killed


class Supervisor:
    """`launcher` None: a LocalLauncher with `log_dir`. `on_ready` is called for each process. Raises ConfigError when
    keys or certificates cannot be used."""

    def __init__(
        self,
        config: ServingConfig,
        log_dir: Path | None = None,
        on_ready: Callable[[Ready], None] = lambda ready: None,
        launcher: Launcher | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.launcher: Launcher = launcher or LocalLauncher(config, log_dir)
        self.keys = load_or_make_keys(self.launcher.here(config), environ)
        self._environ = environ
        self._tls = load_tls(config.security)
        self.config = without_login(config)
        self.generation = Generation()
        self.children = Children()
        self.ready: dict[str, Ready] = {}  # by name of the process
        self.nats: dict[str, Process] = {}  # our own, by name
        self.run: OwnRun | None = None  # from the start on
        self._routes: dict[str, str] = {}  # of `nats` where they are several, by name
        self._on_ready = on_ready
        self._endings = Endings(self.launcher.release)
        self._closing = ExitStack()  # after all processes have ended

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Returns when every process is ready and the router uses every worker. Takes over the processes that an
        earlier supervisor has left behind, and starts what is missing.

        Raises ProcessFailedError, or UnavailableError when NATS does not start, having ended what it had started;
        processes that were taken over stay, and then all others stay too. Raises ConfigError when those that were
        taken over have another configuration, or when another service has a name that one of ours would have.
        """
        living: list[tuple[Launch, Process]] = []
        try:
            living = await self.launcher.living()
            self.take_over(living)
            launches = self.children.launches
            for name, config in configs_for(launches.values(), self.config).items():
                if launches[name].generation.number == self.generation.number:  # a roll-out may have left older ones
                    check_alike(config or self.config, launches[name])
            if not self.children.routers:
                check_router_ports(self.config.router)
            self.run = OwnRun(self.config.namespace, self.keys, self.launcher.on_ray, self.launcher.log_dir)
            self._closing.callback(self.run.close)
            url = await self._nats_url([launch for launch, _ in living])
            self.config = with_nats_url(self.config, url)
            self.run.update(nats=url, models=self.model_names)
            missing = list(self.launches.missing())
            if not self.nats:
                workers = {name for launch in missing for name in launch.workers}
                await self._reach_nats(url, workers, [launch.name for launch in missing if launch.module == ROUTER])
            await run_all(self._until_ready(name, process) for name, process in self.children.items())
            routers = self._start_routers([launch for launch in missing if launch.module == ROUTER])
            await run_all([routers, self._start_workers([launch for launch in missing if launch.module != ROUTER])])
            await self.until_used(self.serving())
            self.run.update(grpc=self.address("grpc"), http=self.address("http"))
        except BaseException:
            if not living:
                await self.kill()
                await self.stop()
            self._closing.close()
            raise

    def take_over(self, living: Iterable[tuple[Launch, Process]]) -> None:
        """The processes of an earlier supervisor, and the keys that they know each other by, are ours from now on."""
        for launch, process in living:
            self._environ = launch.keys
            self.keys = load_keys(self.launcher.here(launch.config), launch.keys)
            self.generation = max(self.generation, launch.generation, key=attrgetter("number"))
            if launch.module == NATS:
                self.nats[launch.name] = process
                self._routes |= launch.routes
            else:
                self.children.add(launch, process)
            self._endings.watch(process)

    async def add_worker(self, role: Role, worker_id: str | None = None, namespace: str | None = None) -> str:
        """The worker's id, once the router uses it. `worker_id`: of no worker that lives. `namespace`: of its model;
        None: there is one. Raises ProcessFailedError; the process of a worker that was too slow lives on."""
        launches = next(one for one in self.launches.models if namespace in (None, one.config.namespace))
        worker_id = worker_id or self.children.new_id(role)
        await self.add(launches.worker(role, worker_id))
        return worker_id

    async def add(self, launch: Launch) -> None:
        """Returns when the routers use the workers of the process, or the workers the router. Raises as `add_worker`
        does."""
        await self._start(launch)
        await self.until_used(launch.workers or self.own_serving())

    def comes_back(self, name: str) -> bool:
        """Whether a process that has ended is one that `start_again` starts."""
        return name in self.nats or (
            name not in self.children.stopped and self.children.launches[name].module == ROUTER
        )

    async def start_again(self, name: str) -> None:
        """Starts a router or NATS, which has ended, on the ports that it had: whoever used it finds it again; or a
        worker. Returns when it is ready, a router with the workers that live. Raises ProcessFailedError,
        UnavailableError; then nothing of it is left."""
        if name in self.nats:
            await self._start_nats_again(name)
            return
        before = self.children.launches[name]
        if before.workers:
            launches = next(one for one in self.launches.models if one.config.namespace == before.config.namespace)
            again = launches.worker(before.workers[name], name, before.config.workers.engine)
        else:
            again = self.launches.router(name, self.ready[name].addresses)
        try:
            await self._start(again)
        except ProcessFailedError:
            await self.children[name].kill()  # it may have been too slow
            raise
        if before.workers:
            return
        with contextlib.suppress(ProcessFailedError):  # a worker has ended meanwhile: the router is there all the same
            await self.until_used(self.own_serving())

    def own_serving(self) -> list[str]:
        """Without external workers, which may be away. Raises as `serving` does."""
        return [name for name in self.serving() if self.children.engine(name) is not None]

    def serving(self) -> list[str]:
        """The workers but for those that say why they do not serve yet. Raises ProcessFailedError when no decode worker
        is left or still to come."""
        problems = {name: ready.problem for name, ready in self.ready.items() if ready.problem}
        decode = self.children.workers("decode")
        if decode and problems.keys() >= {*decode} and not any(self.ready[name].comes for name in decode):
            raise ProcessFailedError(decode[0], f"does not serve: {problems[decode[0]]}")
        return [name for name in [*self.children.workers("prefill"), *decode] if name not in problems]

    async def until_used(self, worker_ids: Iterable[str]) -> None:
        """Those whose model a router does not know, because a roll-out brings or takes it, are not waited for. Raises
        ProcessFailedError."""
        timeout_s = self.config.workers.ready_timeout_s
        routers = [self.children.launches[name].config for name in self.children.routers]
        known = [{model.namespace for model in models_of(router)} for router in routers]
        workers = [one for one in worker_ids if all(self.children.namespace(one) in models for models in known)]
        await until_used(workers, self.client(), self.children, timeout_s)

    async def stop_worker(self, worker_id: str) -> bool:
        """Drains the worker, and those that share its process. False when the process did not end in order, or not in
        time, and had to be killed."""
        return await self.stop_process(self.children.of_worker(worker_id).name)

    async def stop_process(self, name: str) -> bool:
        """Drains a worker's or a router's process; one that was never ready is ended at once. False as `stop_worker`
        says."""
        process = self.children[name]
        self.children.stopped.add(name)
        if process.alive and not process.was_ready:
            await process.kill()
        return await process.stop(_stop_limit_s(self.children.launches[name].config))

    def set_log_level(self, level: LogLevel) -> None:
        """Of this process, of those to come, and of those that live once they open their logs anew."""
        set_level(level)
        logging = msgspec.structs.replace(self.config.logging, level=level)
        self.config = msgspec.structs.replace(self.config, logging=logging)
        self.launcher.renew(self.config)

    def reopen_logs(self) -> None:
        """For who has moved the logs away. A process that is not ready yet goes on in the old one."""
        for process in (*self.children.values(), *self.nats.values()):
            if process.alive and process.was_ready:
                process.reopen_log()

    def worker_client(self, worker_id: str) -> WorkerClient:
        """Raises WorkerLostError when the worker is no process that is ready."""
        if self.children.living(worker_id) is None or worker_id not in self.ready:
            raise WorkerLostError(worker_id, "is no process that is ready")
        return WorkerClient(worker_id, self.ready[worker_id].addresses["rpc"], self.keys.cluster)

    async def sleep(self, worker_id: str, drain_s: float) -> None:
        async with self.worker_client(worker_id) as client:
            await client.sleep(SLEEP_LEVEL, drain_s)

    async def wait(self) -> ProcessExit:
        """The next process that ends without having been told to."""
        return await self._endings.unexpected()

    async def stop(self) -> bool:
        """Drains and ends everything: first the routers, whose requests need the workers, then the workers, then NATS.

        False when something did not end in order, or had to be killed. May be called again.
        """
        routers = [name for name, launch in self.children.launches.items() if launch.module == ROUTER]
        workers = [name for name in self.children if name not in routers]
        for child in self.children.values():
            child.stopping = True
        clean = True
        for group in (routers, workers):
            limits_s = {name: _stop_limit_s(self.children.launches[name].config) for name in group}
            clean &= all(await asyncio.gather(*(self.children[name].stop(limits_s[name]) for name in group)))
        nats, self.nats = self.nats, {}
        await asyncio.gather(*(server.stop(_stop_limit_s(self.config)) for server in nats.values()))
        self._closing.close()
        await self._endings.all()
        self.launcher.close()
        return clean

    async def kill(self) -> None:
        """Ends the routers and the workers now, whatever they are doing."""
        await asyncio.gather(*(child.kill() for child in self.children.values() if child.alive))

    def address(self, name: Literal["grpc", "http"]) -> str:
        """HOST:PORT of an endpoint, which all routers share."""
        return self.router_addresses[name]

    @property
    def router_addresses(self) -> dict[str, str]:
        """Empty before the first router is ready."""
        return next((ready.addresses for ready in self.ready.values() if ready.process == ROUTER), {})

    def stands_in(self, name: str) -> bool:
        """Whether requests are served without the process: without NATS they are."""
        return name in self.nats or any(other != name for other in self.children.routers)

    @property
    def speaks_tls(self) -> bool:
        return self._tls is not None

    def client(self) -> Client:
        """A client of one of the routers. It trusts the certificate that the router was given, under whatever name."""
        tls = self._tls
        ca, name = (None, None) if tls is None else (tls.certificate, tls.name)
        api_key = None if self.keys.api is None else self.keys.api.first()
        return Client(self.address("grpc"), api_key, ca, name, self.keys.operator[0] if self.keys.operator else None)

    @property
    def model_names(self) -> list[str]:
        """Empty where there is one model."""
        return [model.name for model in self.config.models]

    @property
    def launches(self) -> Launches:
        return Launches(self.config, handed_on(self.keys, self._environ), self.children, self.generation)

    async def _nats_url(self, taken_over: Iterable[Launch]) -> str:
        """Starts NATS where those that were taken over look for it, unless it lives or another one is to be used.
        Raises UnavailableError."""
        if (url := self.config.nats.url) is not None:
            return url
        names = nats_names(self.config)
        was = next((url for launch in taken_over if (url := launch.config.nats.url)), None)
        before = {} if was is None else {name: {NATS: url} for name, url in zip(names, each_url(was), strict=True)}
        for name in names if len(names) > 1 else ():
            self._routes[name] = await self.launcher.route(self._routes_but(name), self._routes.get(name, ""))
        await run_all(
            self._until_ready(name, self.nats[name])
            if name in self.nats
            else self._start_nats(name, before.get(name, {}))
            for name in names
        )
        return self._own_nats_url()

    def _own_nats_url(self) -> str:
        return ",".join(self.ready[name].addresses[NATS] for name in nats_names(self.config))

    def _routes_but(self, name: str) -> list[str]:
        return [route for other, route in self._routes.items() if other != name]

    async def _start_nats(self, name: str, addresses: dict[str, str]) -> None:
        launch = msgspec.structs.replace(self.launches.nats(name, self._routes), addresses=addresses)
        process = self.nats[name] = self.launcher.process(launch)
        await self._begin(process)
        await self._until_ready(name, process)

    async def _start_nats_again(self, name: str) -> None:
        """One whose machine is gone starts on another one, where clients find it by the others' words, and processes
        to come by the URL."""
        addresses = self.ready[name].addresses
        if name in self._routes:
            before = self._routes[name]
            self._routes[name] = await self.launcher.route(self._routes_but(name), before)
            addresses = addresses if self._routes[name] == before else {}
        await self._start_nats(name, addresses)
        self.config = with_nats_url(self.config, self._own_nats_url())
        if self.run is not None:
            self.run.update(nats=self.config.nats.url)

    async def _reach_nats(self, url: str, workers: Set[str], routers: Sequence[str]) -> None:
        """Checks NATS before processes are started that would all wait for it, and that nobody there has the names of
        our workers and routers. Raises UnavailableError, UnauthorizedError, ConfigError."""
        timeout_s = min(NATS_TIMEOUT_S, self.config.workers.ready_timeout_s)
        try:
            nats = await connect(url, "supervisor", self.config.namespace, timeout_s, self.keys.nats)
        except UnavailableError as error:
            raise UnavailableError(
                f"nats.url: {error}; start it, or leave nats.url out for a server of our own"
            ) from error
        try:
            for one in models_of(self.config):
                beside = nats.within(one.namespace)
                living = await living_names(beside, workers) | await living_routers(beside, routers)
                if not living:
                    continue
                whose = f"{', '.join(sorted(living))} of another service live in {one.namespace!r} at {url}"
                raise ConfigError("namespace", f"{whose}; end that service, or give this one --namespace ANOTHER")
        finally:
            await nats.close()

    async def _start(self, launch: Launch) -> None:
        process = self.launcher.process(launch)
        self.children.add(launch, process)
        self.children.places[launch.name] = self.launcher.place(process)
        self.children.starting.add(launch.name)
        try:
            await self._begin(process)
        finally:
            self.children.starting.discard(launch.name)
        await self._until_ready(launch.name, process)

    async def _start_routers(self, launches: Sequence[Launch]) -> None:
        """All take the same ports. Where free ones are wanted the first router finds them."""
        if launches and not self.router_addresses and 0 in (self.config.router.http_port, self.config.router.grpc_port):
            first, *launches = launches
            await self._start(first)
        at_known = [msgspec.structs.replace(launch, addresses=self.router_addresses) for launch in launches]
        await run_all(map(self._start, at_known))

    async def _start_workers(self, launches: Sequence[Launch]) -> None:
        sleepers = sleeping_namespaces(self.config)
        asleep = self._start_asleep([one for one in launches if one.config.namespace in sleepers])
        await run_all([asleep, *(self._start(one) for one in launches if one.config.namespace not in sleepers)])

    async def _start_asleep(self, launches: Iterable[Launch]) -> None:
        """The workers of a model fall asleep before those of the next one start, which may be given the same GPUs."""
        for _, of_model in groupby(launches, key=lambda launch: launch.config.namespace):
            workers = list(of_model)
            await run_all(map(self._start, workers))
            names = [name for launch in workers for name in launch.workers]
            await run_all(self.sleep(name, self.config.workers.drain_timeout_s) for name in names)

    async def _begin(self, process: Process) -> None:
        try:
            await process.start()
        except BaseException:
            self.launcher.release(process)
            raise
        self._endings.watch(process)

    async def _until_ready(self, name: str, process: Process) -> None:
        self.ready[name] = await process.wait_ready(self.config.workers.ready_timeout_s)
        self._on_ready(self.ready[name])


def _stop_limit_s(config: ServingConfig) -> float:
    """Of a process that was started with it, which keeps the limit itself."""
    return config.router.drain_window_s + config.workers.drain_timeout_s + DRAIN_GRACE_S
