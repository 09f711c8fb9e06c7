"""The planner of a live service. It runs in the supervisor's process, because only that process can start and end
workers: `baton up`, or the control actor on a Ray cluster."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from baton.service.planning.budget import gpu_budget, gpus_per_worker
from baton.service.planning.supervisor_connector import SupervisorConnector
from baton.service.supervisor import Supervisor
from baton.service.telling import Tell
from planner.service import PlannerService
from runtime.end_task import end_tasks
from runtime.nats.client import connect


@dataclass(frozen=True, slots=True)
class LivePlanner:
    service: PlannerService
    connector: SupervisorConnector

    async def hold(self, why: str) -> None:
        """From now on the planner begins nothing. Returns when what it had begun has ended."""
        self.service.held = why
        await self.connector.settled()


@asynccontextmanager
async def live_planner(supervisor: Supervisor, tell: Tell) -> AsyncIterator[LivePlanner]:
    """Plans for the workers of a started supervisor until the context ends; effects in flight are then cancelled.
    `tell` hears when it answers operators, and what it ends. Raises UnavailableError when NATS does not answer,
    ConfigError when the journal cannot be written."""
    config, keys = supervisor.launcher.here(supervisor.config), supervisor.keys
    machines = supervisor.launcher.machines
    assert config.nats.url is not None, "not started"
    async with AsyncExitStack() as closing:
        nats = await connect(config.nats.url, "planner", config.namespace, config.workers.ready_timeout_s, keys.nats)
        closing.push_async_callback(nats.close)
        connector = SupervisorConnector(supervisor, tell)
        closing.push_async_callback(connector.close)
        service = PlannerService(
            config, nats, connector, gpu_budget(config, machines), gpus_per_worker(config, machines), keys
        )
        task = asyncio.create_task(service.run(partial(_tell_ready, tell)), name="planner")
        closing.push_async_callback(end_tasks, task)
        yield LivePlanner(service, connector)


def _tell_ready(tell: Tell, address: str) -> None:
    url = f"http://{address}/metrics"
    tell(f"planner at work, metrics on {url}", event="planner", metrics=url)
