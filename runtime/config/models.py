"""The configuration of each model of a service."""

from collections.abc import Sequence

import msgspec

from runtime.config.model_entry import ModelConfig, model_namespace
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig


def models_of(config: ServingConfig) -> list[ServingConfig]:
    """One for each model, as if it were served alone: its workers know nothing of the others. Raises ConfigError."""
    return [model_of(config, model) for model in config.models] or [config]


def entries_of(config: ServingConfig) -> Sequence[ModelConfig]:
    """In the order of `models_of`. A model that is served alone has what an entry has that says no more."""
    return config.models or [ModelConfig(name=config.served_model_name or "", model=config.model)]


def sleeping_namespaces(config: ServingConfig) -> set[str]:
    """Those of the models that sleep until somebody asks for them."""
    each = zip(entries_of(config), models_of(config), strict=True)
    return {model.namespace for entry, model in each if entry.sleeps}


def model_of(config: ServingConfig, model: ModelConfig) -> ServingConfig:
    """Raises ConfigError."""
    alone = msgspec.structs.replace(config, models=())
    one = with_overrides(alone, {"engine": model.engine}, f"models: {model.name}") if model.engine else alone
    workers, router = config.workers, config.router
    share = model.weight / sum(other.weight for other in config.models)
    return msgspec.structs.replace(
        one,
        model=model.model,
        served_model_name=model.name,
        namespace=model_namespace(config.namespace, model.name),
        workers=msgspec.structs.replace(
            workers,
            prefill=workers.prefill if model.prefill is None else model.prefill,
            decode=workers.decode if model.decode is None else model.decode,
            per_process=1 if model.sleeps else workers.per_process,
        ),
        router=msgspec.structs.replace(
            router,
            tool_parser=model.tool_parser or router.tool_parser,
            reasoning_parser=model.reasoning_parser or router.reasoning_parser,
            queue_limit=max(1, round(router.queue_limit * share)),
        ),
        planner=msgspec.structs.replace(config.planner, enabled=config.planner.enabled and not model.sleeps),
        external_workers=model.external_workers,
        adapters=model.adapters,
    )
