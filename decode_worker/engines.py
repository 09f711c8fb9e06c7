"""Which engine a worker computes with: one row for each value of `workers.engine`."""

import importlib

from runtime.config.serving import ServingConfig
from worker.assembly import EngineAssembly, EngineFactory

BUILDERS = {"baton": ("worker.assembly", "build_engine"), "vllm": ("worker.vllm_assembly", "build_vllm")}
"""Module and function; only the module of the engine that is wanted is imported."""


def build_worker_engine(config: ServingConfig) -> EngineAssembly:
    """Raises ConfigError or ModelError."""
    module, function = BUILDERS[config.workers.engine]
    build: EngineFactory = getattr(importlib.import_module(module), function)
    return build(config)
