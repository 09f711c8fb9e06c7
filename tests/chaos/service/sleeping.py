"""Several models that sleep until somebody asks for them, with room for some: requests swap them under faults."""

import asyncio
from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from baton.service.launcher import Launch, Machines
from baton.service.sleeping.sleepers import Sleepers
from baton.service.supervisor import Supervisor
from baton_proto.generated import inference_pb2 as pb
from runtime.config.models import models_of
from runtime.config.serving import ServingConfig, load_config
from runtime.processes.process import Process
from runtime.security.keys import load_keys
from tests.chaos.service.fleet import POLL_S, Fleet

ASLEEP = {"asleep": "until_asked", "idle_s": 0.5, "wake_timeout_s": 60.0}


@dataclass(eq=False)
class SleepingFleet(Fleet):
    """A worker that sleeps is able to answer: who asks for it wakes it."""

    _slept: set[str] = field(default_factory=set)
    _sleepers: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def start(self) -> None:
        await super().start()
        config = load_config(self.folder / "router-1.yaml")
        supervisor = cast(Supervisor, _Processes(self, config))
        await self._sleepers.enter_async_context(Sleepers(supervisor, self._told))
        async with asyncio.timeout(self.scenario.start_s):
            while self._slept < {*self.scenario.models}:
                await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        await self._sleepers.aclose()
        if not self.wakes:
            self.problems.append("no model has woken")
        await super().close()

    def serving(self, worker: pb.WorkerStatus) -> bool:
        return worker.used or worker.state in ("sleeping", "draining")

    def _told(self, line: str, *, event: str, **fields: Any) -> None:
        self.wakes += event == "awake"
        if event == "asleep":
            self._slept.add(fields["model"])

    def _of_models(self, name: str) -> dict[str, Any]:
        sections = super()._of_models(name)
        return sections if name else {"models": [entry | ASLEEP for entry in sections["models"]]}


class _Processes:
    """What Sleepers wants to know of the processes that a supervisor has started. These are the fleet's."""

    def __init__(self, fleet: Fleet, config: ServingConfig) -> None:
        self.config = config
        self.keys = load_keys(config, {"BATON_CLUSTER_KEY": fleet.key})
        self.children = self
        self.launcher = SimpleNamespace(machines=Machines(0, 1), place=_nowhere)
        self.starting: Collection[str] = ()
        self._fleet = fleet
        of_model = {one.served_model_name: one for one in models_of(config)}
        workers = fleet.of("prefill", "decode")
        self.launches = {
            one.name: Launch(one.name, f"{one.kind}_worker", of_model[fleet.serves[one.name]], ranks=1)
            for one in workers
        }

    def living_of(self) -> list[str]:
        return [name for name in self.launches if self._fleet.members[name].alive]

    def __getitem__(self, name: str) -> Process:
        return cast(Process, self._fleet.members[name])


def _nowhere(process: Process) -> Collection[str]:
    return ()
