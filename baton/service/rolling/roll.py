"""Carries out a roll-out: workers first, then routers, each new process before an old one ends where there is room.

Invariant: nothing that serves ends before what takes its place serves, except a worker that has no room beside it.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

import grpc

from baton.service.launcher import Generation, Launch
from baton.service.rolling.plan import Plan, Source, living, plan
from baton.service.supervisor import Supervisor
from baton.service.telling import Tell
from baton_proto.planner import Role
from runtime.config.serving import ServingConfig
from runtime.errors import BatonError, UnavailableError
from runtime.processes.process import ProcessFailedError

STATUS_S: Final = 10.0
BACK_TRIES: Final = 3  # a worker that dies on the way back is replaced by the next try


async def roll_out(
    supervisor: Supervisor, config: ServingConfig, generation: Generation, first: Source, tell: Tell
) -> None:
    """Raises BatonError when a new process does not become ready. The service is then what it was before."""
    former, lived = (supervisor.config, supervisor.generation), living(supervisor.children)
    try:
        await _Roll(supervisor, config, generation, first, lived, tell).carry_out()
    except BatonError as error:
        tell(f"error: {error}; the service becomes what it was", event="failed", reason=str(error))
        for left in reversed(range(BACK_TRIES)):
            try:
                await _Roll(supervisor, *former, first, lived, tell).carry_out()
                break
            except BatonError as worse:
                if not left:
                    raise UnavailableError(f"{error}; and what was there did not come back: {worse}") from worse
        raise


class _Roll:
    def __init__(
        self,
        supervisor: Supervisor,
        config: ServingConfig,
        generation: Generation,
        first: Source,
        lived: Mapping[tuple[str, Role], int],
        tell: Tell,
    ) -> None:
        self._supervisor = supervisor
        self._first = first
        self._lived = lived
        self._tell = tell
        self._children = supervisor.children
        self._started: list[str] = []  # processes of workers
        supervisor.config, supervisor.generation = config, generation

    async def carry_out(self) -> None:
        """Raises BatonError, having ended the process that did not become ready."""
        for name in self._plan().external:
            await self._end(name)
        await self._replace_workers()
        await self._replace_routers()
        for name in self._plan().unserved:
            await self._end(name)
        self._children.stopped.update(name for name, child in self._children.items() if not child.alive)
        if self._supervisor.run is not None:
            self._supervisor.run.update(models=self._supervisor.model_names)
        await self._supervisor.until_used(self._supervisor.own_serving())
        self._supervisor.set_log_level(self._supervisor.config.logging.level)
        self._supervisor.reopen_logs()

    async def _replace_workers(self) -> None:
        now, config = self._plan(), self._supervisor.config
        launches = self._supervisor.launches
        coming: list[Launch] = []
        for model in launches.models:
            coming += model.workers(now.lacking[model.config.namespace])
            servers = model.config.external_workers
            coming += [model.external(one) for one in servers if self._children.living(one.name) is None]
        asleep = await self._asleep() if now.old else set()
        going = sorted(now.old, key=lambda name: (name in asleep, "decode" in self._roles(name)))
        dozed = Counter(kind for name in going if name in asleep for kind in self._kinds(name))
        going += now.unserved  # last, because requests for their model still come
        for launch in sorted(coming, key=lambda launch: "decode" not in launch.workers.values()):
            while going and not await self._supervisor.launcher.has_room(launch):
                await self._end(going.pop(0))
            await self._start(launch)
            self._started.append(launch.name)
        for name in going:
            if name in now.old:
                await self._end(name)
        for kind, count in dozed.items():
            for name in [one for one in self._started if self._kinds(one) == [kind]][:count]:
                await self._supervisor.sleep(name, config.workers.drain_timeout_s)

    async def _replace_routers(self) -> None:
        """Until all are as wanted: one that dies meanwhile is started again, beside the one that takes its place."""
        while (now := self._plan()).new_routers or now.old_routers:
            going = list(now.old_routers)
            for _ in range(now.new_routers):
                await self._start(self._supervisor.launches.router(addresses=self._supervisor.router_addresses))
                if going:
                    await self._end(going.pop(0))
            for name in going:
                await self._end(name)

    def _plan(self) -> Plan:
        return plan(self._children, self._supervisor.config, self._supervisor.generation, self._first, self._lived)

    def _roles(self, name: str) -> list[str]:
        return [*self._children.launches[name].workers.values()]

    def _kinds(self, name: str) -> list[tuple[str, str]]:
        """Namespace and role of each worker in a process."""
        return [(self._children.launches[name].config.namespace, role) for role in self._roles(name)]

    async def _asleep(self) -> set[str]:
        """Processes whose workers all sleep. Empty while no router answers: then the order does not matter much."""
        try:
            async with self._supervisor.client() as client:
                status = await client.status(STATUS_S)
        except grpc.aio.AioRpcError:
            return set()
        asleep = {worker.worker_id for worker in status.workers if worker.state == "sleeping"}
        launches = self._children.launches.items()
        return {name for name, launch in launches if launch.workers and launch.workers.keys() <= asleep}

    async def _start(self, launch: Launch) -> None:
        self._tell(f"{launch.name} starts", event="starts", id=launch.name)
        try:
            await self._supervisor.add(launch)
        except BatonError:
            if self._children[launch.name].alive:
                await self._children[launch.name].kill()
            raise

    async def _end(self, name: str) -> None:
        """Raises ProcessFailedError, and ends nothing, when a new worker has ended again."""
        for one in self._started:
            if not self._children[one].alive:
                raise ProcessFailedError(one, "has ended again")
        self._tell(f"{name} drains", event="drains", id=name)
        if not await self._supervisor.stop_process(name):
            self._tell(f"{name} did not end in order", event="unclean", id=name)
