"""The files and folders that a configuration names, for processes that work in another folder."""

import functools
import operator
from pathlib import Path

import msgspec

from runtime.config.serving import ServingConfig, parse_config

GENERATION_CONFIGS = ("auto", "none")  # what is no folder
PATH_KEYS = {
    "engine.disk_kv": ("folder",),
    "nats": ("store_dir", "credentials_file"),
    "planner": ("journal",),
    "workers": ("python",),
    "security": ("api_key_file", "tls_cert_file", "tls_key_file", "cluster_key_file", "operator_key_file"),
}


def with_absolute_paths(config: ServingConfig) -> ServingConfig:
    """The configuration for processes that work in another folder."""
    data = msgspec.to_builtins(config)
    for name, keys in PATH_KEYS.items():
        section = functools.reduce(operator.getitem, name.split("."), data)
        section |= {key: _absolute(path) for key in keys if (path := section[key]) is not None}
    for worker in data["external_workers"]:
        worker |= {key: _absolute(worker[key]) for key in ("api_key_file", "ca_file") if worker[key] is not None}
    data["workers"]["weights_folders"] = [_absolute(folder) for folder in config.workers.weights_folders]
    if Path(config.model).expanduser().exists():
        data["model"] = _absolute(config.model)
    if config.router.generation_config not in GENERATION_CONFIGS:
        data["router"]["generation_config"] = _absolute(config.router.generation_config)
    return parse_config(data)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
