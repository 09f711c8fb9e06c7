"""A configuration as a person wrote it, filled in with what suits model and machines."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from baton.service.launcher import Machines, uses_gpus
from baton.service.wanted.machine_defaults import described, suited
from runtime.checkpoint.model_files import ModelFiles, pinned
from runtime.checkpoint.served_model import is_mock, served_model
from runtime.checkpoint.slow_tokenizer import FAST
from runtime.config.models import models_of
from runtime.config.overrides import merged, with_overrides
from runtime.config.serving import ServingConfig
from runtime.errors import ConfigError
from worker.engines.table import block_size_elsewhere


class Wanted(Struct, frozen=True):
    """A service that is to be: its configuration, what the user wrote of it, and its model."""

    config: ServingConfig
    given: dict[str, Any]
    files: ModelFiles

    @property
    def model_name(self) -> str:
        """What clients ask for."""
        return self.config.served_model_name or self.files.name

    def suited(self, machines: Machines) -> "Wanted":
        """Fills what the configuration leaves open with what suits the machines."""
        gpu = uses_gpus(self.config, machines)
        config = suited(self.config, self.given, self.files, gpu=gpu)
        if self.given.get("engine", {}).get("block_size", "auto") == "auto":
            size = block_size_elsewhere(config) or config.engine.block_size
            config = with_overrides(config, {"engine": {"block_size": size}}, "external_workers")
        return msgspec.structs.replace(self, config=config)

    def chosen(self, machines: Machines) -> dict[str, Any]:
        """What the workers' engines take, chosen or configured. Empty for the mock engine."""
        return {} if is_mock(self.config) else described(self.config, self.files, gpu=uses_gpus(self.config, machines))


def wanted_models(config: ServingConfig, given: dict[str, Any], *, progress: bool = False) -> list[Wanted]:
    """Each model as if it were served alone. Raises ConfigError, ModelError."""
    changes = [{"engine": model.engine} for model in config.models] or [{}]
    each = zip(models_of(config), changes, strict=True)
    return [wanted(one, laid_over(given, changed), progress=progress) for one, changed in each]


def together(config: ServingConfig, services: Sequence[Wanted]) -> ServingConfig:
    """One configuration of all that `wanted_models` has made of it."""
    if not config.models:
        return services[0].config
    models = [
        msgspec.structs.replace(model, model=one.config.model, engine=msgspec.to_builtins(one.config.engine))
        for model, one in zip(config.models, services, strict=True)
    ]
    return msgspec.structs.replace(config, models=tuple(models))


def wanted(config: ServingConfig, given: dict[str, Any], *, progress: bool = False) -> Wanted:
    """Fetches or converts the model, once, with its progress on the terminal. Raises ConfigError, ModelError."""
    files = served_model(config, progress)
    return Wanted(msgspec.structs.replace(config, model=pinned(config.model, files)), given, files)


def laid_over(base: Mapping[str, Any], *changes: Mapping[str, Any]) -> dict[str, Any]:
    """Parts of serving.yaml as one; later ones go before earlier ones."""
    return functools.reduce(merged, map(dict, changes), dict(base))


def changed(base: Mapping[str, Any], settings: Mapping[str, Any], model: str, *, runs: bool = False) -> dict[str, Any]:
    """`base` with `settings`: of one of its models; empty: of the service. `runs`: each model of `base` has all keys of
    the engine, so those of the service are set there too. Raises ConfigError."""
    models = list(base.get("models", ()))
    if not models and model:
        raise ConfigError("--model", "names one of several models, and there is one: leave it out")
    if not model:
        engine = {"engine": settings.get("engine", {})} if runs else {}
        return laid_over({**base, "models": [merged(one, engine) for one in models]}, settings)
    names = [one["name"] for one in models]
    if model not in names:
        raise ConfigError("--model", f"is {model!r}, which is not served: {', '.join(names)}")
    models[names.index(model)] = merged(models[names.index(model)], dict(settings))
    return {**base, "models": models}


def refuse_other_tokens(running: Wanted, service: Wanted) -> None:
    """Raises ConfigError for a model that clients or processes of the running one would take for another one."""
    if service.model_name != running.model_name:
        name = running.model_name
        problem = (
            f"clients ask for {name!r}, and this one is {service.model_name!r}: add --set served_model_name={name}"
        )
        raise ConfigError("served_model_name", problem)
    if _tokens(running.files) != _tokens(service.files):
        problem = "its tokens are not those of the running model, which answers under way are of: start another service"
        raise ConfigError("model", problem)


def weights_state(files: ModelFiles) -> str:
    """Another one when the model's files were replaced where they lie, or a link leads elsewhere."""
    stats = [(path.name, path.stat()) for path in sorted(files.folder.glob("*.safetensors"))]
    shown = [str(files.folder.resolve()), *(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)]
    return hashlib.blake2b("\n".join(shown).encode(), digest_size=8).hexdigest()


def _tokens(files: ModelFiles) -> tuple[bytes, int]:
    return (files.folder / FAST).read_bytes(), files.config.vocab_size
