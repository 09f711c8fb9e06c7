"""The planner of a service on one machine. It runs in the process of `baton up`, which alone can start and end the
workers: when that process dies, its workers do too, and a planner of its own would have nothing left to plan."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from baton.config import ServingConfig
from baton.end_task import end_tasks
from baton.gpu_places import visible_gpus
from baton.nats_client import connect
from baton.supervisor import Supervisor
from engine.served_model import is_mock
from planner.local_connector import LocalConnector
from planner.service import PlannerService


@asynccontextmanager
async def local_planner(
    supervisor: Supervisor, on_ready: Callable[[str], None] = lambda address: None
) -> AsyncIterator[None]:
    """Plans for the workers of a supervisor that was started, until the end of the context; then what is under way is
    let go of. `on_ready` gets HOST:PORT of the metrics, once the planner listens. Raises UnavailableError when NATS
    does not answer, ConfigError when the journal cannot be written."""
    config, keys = supervisor.config, supervisor.keys
    assert config.nats.url is not None, "not started"
    async with AsyncExitStack() as closing:
        nats = await connect(config.nats.url, "planner", config.namespace, config.workers.ready_timeout_s, keys.nats)
        closing.push_async_callback(nats.close)
        connector = LocalConnector(supervisor)
        closing.push_async_callback(connector.close)
        service = PlannerService(config, nats, connector, gpu_budget(config), gpus_per_worker(config), keys)
        task = asyncio.create_task(service.run(on_ready), name="planner")
        closing.push_async_callback(end_tasks, task)
        yield


def gpu_budget(config: ServingConfig) -> int:
    """What the configuration says, or what this machine has. Where there are no GPUs a worker counts as one: then it is
    the cores that bound them, and of the mock engine, which computes nothing, only the limits of each role."""
    limits = config.planner.limits
    if limits.gpu_budget is not None:
        return limits.gpu_budget
    if is_mock(config):
        return limits.max_prefill + limits.max_decode
    return len(_gpus(config)) or len(os.sched_getaffinity(0))


def gpus_per_worker(config: ServingConfig) -> int:
    return config.engine.tensor_parallel if _gpus(config) else 1


def _gpus(config: ServingConfig) -> list[str]:
    return [] if config.engine.device == "cpu" or is_mock(config) else visible_gpus()
