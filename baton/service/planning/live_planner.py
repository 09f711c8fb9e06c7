"""The planners of a live service, one for each model that does not sleep until it is asked for. They run in the
supervisor's process, because only that process can start and end workers: `baton up`, or the control actor on a Ray
cluster."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from baton.service.planning.budget import gpu_budget, gpus_per_worker, has_own_budget
from baton.service.planning.supervisor_connector import SupervisorConnector
from baton.service.supervisor import Supervisor
from baton.service.telling import Tell
from planner.service import PlannerService
from planner.shared_budget import SharedBudget
from runtime.config.model_entry import ModelConfig
from runtime.config.models import entries_of, models_of
from runtime.config.serving import ServingConfig
from runtime.end_task import end_tasks
from runtime.nats.client import NatsClient, connect


@dataclass(frozen=True, slots=True)
class LivePlanner:
    services: Sequence[PlannerService]
    connectors: Sequence[SupervisorConnector]

    async def hold(self, why: str) -> None:
        """From now on the planners begin nothing. Returns when what they had begun has ended."""
        for service in self.services:
            service.held = why
        await asyncio.gather(*(connector.settled() for connector in self.connectors))


@asynccontextmanager
async def live_planner(
    supervisor: Supervisor, tell: Tell, kept: Callable[[], int] = lambda: 0
) -> AsyncIterator[LivePlanner]:
    """Plans for the workers of a started supervisor until the context ends; effects in flight are then cancelled.
    `tell` hears when it answers operators, and what it ends. `kept`: GPUs that models hold which sleep. Raises
    UnavailableError when NATS does not answer, ConfigError when the journal cannot be written."""
    config, keys = supervisor.launcher.here(supervisor.config), supervisor.keys
    assert config.nats.url is not None, "not started"
    async with AsyncExitStack() as closing:
        nats = await connect(config.nats.url, "planner", config.namespace, config.workers.ready_timeout_s, keys.nats)
        closing.push_async_callback(nats.close)
        shared = SharedBudget(gpu_budget(config, supervisor.launcher.machines), kept)
        services, connectors = [], []
        for entry, one in zip(entries_of(config), models_of(config), strict=True):
            if not one.planner.enabled:
                continue
            connector = SupervisorConnector(supervisor, tell, one.namespace)
            closing.push_async_callback(connector.close)
            service = _planner(supervisor, entry, one, nats.within(one.namespace), connector, shared)
            task = asyncio.create_task(service.run(partial(_tell_ready, tell)), name=f"planner {one.namespace}")
            closing.push_async_callback(end_tasks, task)
            services.append(service)
            connectors.append(connector)
        yield LivePlanner(services, connectors)


def _planner(
    supervisor: Supervisor,
    entry: ModelConfig,
    config: ServingConfig,
    nats: NatsClient,
    connector: SupervisorConnector,
    shared: SharedBudget,
) -> PlannerService:
    """`config`: of the model. Raises ConfigError."""
    machines, keys = supervisor.launcher.machines, supervisor.keys
    budget, gpus = gpu_budget(config, machines), gpus_per_worker(config, machines)
    if not supervisor.config.models:
        return PlannerService(config, nats, connector, budget, gpus, keys)
    if config.planner.journal is not None:
        path = Path(config.planner.journal)
        journal = str(path.with_stem(f"{path.stem}-{entry.slug}"))
        config = msgspec.structs.replace(config, planner=msgspec.structs.replace(config.planner, journal=journal))
    holds = sum(gpus[process.role] for process in connector.processes())
    member = None if has_own_budget(config) else shared.member(entry.name, holds, entry.weight)
    return PlannerService(config, nats, connector, budget, gpus, keys, entry.slug, member)


def _tell_ready(tell: Tell, address: str) -> None:
    url = f"http://{address}/metrics"
    tell(f"planner at work, metrics on {url}", event="planner", metrics=url)
