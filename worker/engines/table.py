"""Which engines a worker may have: a module beside this one and a row here for each."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from runtime.checkpoint.served_model import is_mock
from runtime.config.external import ExternalWorkerConfig
from runtime.config.serving import ServingConfig
from runtime.errors import ConfigError, nearest
from worker.engines.base import EngineAssembly, EngineElsewhere

EngineFactory = Callable[[ServingConfig], EngineAssembly]


@dataclass(frozen=True, slots=True)
class EngineRow:
    """Functions stand as MODULE:NAME, because only the module of the engine that is wanted is imported."""

    name: str  # in workers.engine
    build: str  # an EngineFactory, which raises ConfigError or ModelError
    needs: str = ""  # what the interpreter that workers.python names must have; empty: ours serves
    block_size: str = ""  # takes the ServingConfig, and returns what the engine has; None: it is not known
    check: str = ""  # takes the ServingConfig before any process starts, and raises ConfigError; empty: no check

    def checked(self, config: ServingConfig) -> None:
        if self.check:
            _named(self.check)(config)


OWN: Final = EngineRow("baton", "worker.engines.own:build_own", check="worker.changes.adapters:check_without")
MOCK: Final = EngineRow("mock", "worker.engines.own:build_mock")  # chosen by the model
EXTERNAL: Final = EngineRow(  # of the section external_workers
    "external", "worker.engines.external:ExternalEngine", block_size="engine.vllm.server.agreement:block_size_of_any"
)
ENGINES: Final = (
    OWN,
    EngineRow("vllm", "worker.engines.vllm:build_vllm", needs="vLLM", check="engine.vllm.arguments:check_vllm"),
)
"""The engines that workers.engine can name."""
NAMES: Final = tuple(row.name for row in ENGINES)


def check_names(config: ServingConfig) -> None:
    """Raises ConfigError for an engine that there is not."""
    given = {"workers.engine": config.workers.engine}
    for role, counts in (("prefill", config.workers.prefill), ("decode", config.workers.decode)):
        if not isinstance(counts, int):
            given |= {f"workers.{role}.{name}": name for name in counts}
    for key, name in given.items():
        if name not in NAMES:
            near = nearest(name, NAMES, "one")
            raise ConfigError(key, f"there is no engine {name!r}; there are {', '.join(NAMES)}{near}")


def rows_of(config: ServingConfig) -> list[EngineRow]:
    """The rows of the workers that the service starts. Raises ConfigError for an engine that there is not."""
    check_names(config)
    return [row for row in ENGINES if config.uses(row.name)]


def row_of(config: ServingConfig) -> EngineRow:
    """The row of a worker with this configuration. Raises ConfigError for an engine that there is not."""
    check_names(config)
    (row,) = (row for row in ENGINES if row.name == config.workers.engine)
    return MOCK if row is OWN and is_mock(config) else row


def build_worker_engine(config: ServingConfig) -> EngineAssembly:
    """Raises ConfigError or ModelError."""
    build: EngineFactory = _named(row_of(config).build)
    return build(config)


def engine_elsewhere(config: ServingConfig, external: ExternalWorkerConfig) -> EngineElsewhere:
    """Raises ConfigError or ModelError."""
    build: Callable[[ServingConfig, ExternalWorkerConfig], EngineElsewhere] = _named(EXTERNAL.build)
    return build(config, external)


def block_size_elsewhere(config: ServingConfig) -> int | None:
    """Tokens of a KV block of the engines that run already; None: there are none, or they do not answer."""
    if not config.external_workers:
        return None
    size: int | None = _named(EXTERNAL.block_size)(config)
    return size


def _named(function: str) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)
