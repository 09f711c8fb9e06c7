"""The planner of a live service. It runs in the process that supervises the workers and alone can start and end them:
`baton up`, or the control actor on a Ray cluster."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from baton.config import ServingConfig
from baton.end_task import end_tasks
from baton.launcher import Machines, uses_gpus
from baton.nats_client import connect
from baton.supervisor import Supervisor
from engine.served_model import is_mock
from planner.service import PlannerService
from planner.supervisor_connector import SupervisorConnector


@asynccontextmanager
async def live_planner(
    supervisor: Supervisor, on_ready: Callable[[str], None] = lambda address: None
) -> AsyncIterator[None]:
    """Plans for the workers of a supervisor that was started, until the end of the context; then what is under way is
    let go of. `on_ready` gets HOST:PORT of the metrics, once the planner listens. Raises UnavailableError when NATS
    does not answer, ConfigError when the journal cannot be written."""
    config, machines = supervisor.launcher.here(supervisor.config), supervisor.launcher.machines
    assert config.nats.url is not None, "not started"
    async with AsyncExitStack() as closing:
        nats = await connect(config.nats.url, "planner", config.namespace, config.workers.ready_timeout_s)
        closing.push_async_callback(nats.close)
        connector = SupervisorConnector(supervisor)
        closing.push_async_callback(connector.close)
        service = PlannerService(
            config, nats, connector, gpu_budget(config, machines), gpus_per_worker(config, machines)
        )
        task = asyncio.create_task(service.run(on_ready), name="planner")
        closing.push_async_callback(end_tasks, task)
        yield


def gpu_budget(config: ServingConfig, machines: Machines) -> int:
    """What the configuration says, or what there is. Where there are no GPUs a worker counts as one: then it is the
    cores that bound them, and of the mock engine, which computes nothing, only the limits of each role."""
    limits = config.planner.limits
    if limits.gpu_budget is not None:
        return limits.gpu_budget
    if is_mock(config):
        return limits.max_prefill + limits.max_decode
    return machines.gpus if uses_gpus(config, machines) else machines.cores


def gpus_per_worker(config: ServingConfig, machines: Machines) -> int:
    return config.engine.tensor_parallel if uses_gpus(config, machines) else 1
