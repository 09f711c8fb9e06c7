"""The adapters of a worker: those that it has from its start on, and what an operator changes."""

from collections.abc import Mapping

import structlog

from baton_proto.decoding import MAX_TEXT
from baton_proto.worker import AdapterReport, AdapterRequest
from runtime.config.serving import ServingConfig
from runtime.discovery.wanted_adapters import UNLOADED, changed_adapters
from runtime.errors import ConfigError, ModelError, UnavailableError
from runtime.nats.client import NatsClient
from worker.engines.base import EngineAssembly
from worker.runtime import WorkerRuntime

NO_ADAPTERS = "our own engine has none: set workers.engine: vllm, or leave it out"

log = structlog.get_logger()


def check_without(config: ServingConfig) -> None:
    """Raises ConfigError for adapters where workers with our own engine may serve the model."""
    if config.adapters and config.computes:
        raise ConfigError(f"adapters.{next(iter(config.adapters))}", NO_ADAPTERS)


async def load_wanted(assembly: EngineAssembly, configured: Mapping[str, str], nats: NatsClient) -> str:
    """`configured`: folders by name; an operator's changes go before them. What the engine has by such a name already
    is taken for the adapter. Returns which it does not get, and why. Raises UnavailableError."""
    problems: list[str] = []
    if (adapters := assembly.adapters) is None:
        return ""
    for name, folder in {**configured, **await changed_adapters(nats)}.items():
        try:
            if folder != UNLOADED and name not in assembly.adapter_names:
                await adapters.load(name, folder)
        except (ModelError, UnavailableError) as error:
            if name not in assembly.adapter_names:  # else another rank's worker was sooner
                log.error("an adapter is not there", adapter=name, reason=str(error))
                problems.append(f"no adapter {name}: {error}")
    return "; ".join(problems)


async def change_adapter(runtime: WorkerRuntime, request: AdapterRequest) -> AdapterReport:
    """Routers are told before the answer."""
    assembly, problem = runtime.assembly, ""
    try:
        if assembly.adapters is None:
            problem = f"an engine of the kind {assembly.name} has no adapters"
        elif request.folder == UNLOADED:
            await assembly.adapters.unload(request.name)
        else:
            await assembly.adapters.load(request.name, request.folder)
    except (ModelError, UnavailableError) as error:
        problem = str(error)[:MAX_TEXT]
    if not problem:
        runtime.lacks = ""
        await runtime.tell()
    return AdapterReport(assembly.adapter_names, problem)
