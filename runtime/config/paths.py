"""The files and folders that a configuration names, for processes that work in another folder."""

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from runtime.config.serving import ServingConfig, parse_config

GENERATION_CONFIGS = ("auto", "none")  # what is no folder
NO_PATHS = (None, "-")  # "-" is stdout
PATH_KEYS = {
    "nats": ("store_dir", "credentials_file"),
    "logging": ("usage",),
    "planner": ("journal",),
    "router": ("batch_folder",),
    "workers": ("python",),
    "security": ("api_key_file", "tls_cert_file", "tls_key_file", "cluster_key_file", "operator_key_file"),
}


def with_absolute_paths(config: ServingConfig) -> ServingConfig:
    """The configuration for processes that work in another folder."""
    return parse_config(absolute(msgspec.to_builtins(config)))


def absolute(data: Mapping[str, Any]) -> dict[str, Any]:
    """Any part of serving.yaml, as plain data that parse_config() takes, with absolute paths."""
    result: dict[str, Any] = copy.deepcopy(dict(data))
    for name, keys in PATH_KEYS.items():
        section = functools.reduce(lambda part, key: part.get(key) or {}, name.split("."), result)
        section |= {key: _absolute(section[key]) for key in keys if section.get(key) not in NO_PATHS}
    models = [result, *result.get("models", ())]
    for worker in (worker for one in models for worker in one.get("external_workers", ())):
        worker |= {key: _absolute(worker[key]) for key in ("api_key_file", "ca_file") if worker.get(key) is not None}
    if folders := result.get("workers", {}).get("weights_folders"):
        result["workers"]["weights_folders"] = [_absolute(folder) for folder in folders]
    for one in models:
        if (model := one.get("model")) is not None and Path(model).expanduser().exists():
            one["model"] = _absolute(model)
        if adapters := one.get("adapters"):  # a server's folders may be on its machine alone
            one["adapters"] = {
                name: _absolute(folder) if Path(folder).expanduser().exists() else folder
                for name, folder in adapters.items()
            }
        if folder := ((one.get("engine") or {}).get("disk_kv") or {}).get("folder"):
            one["engine"]["disk_kv"]["folder"] = _absolute(folder)
    generation_config = result.get("router", {}).get("generation_config", GENERATION_CONFIGS[0])
    if generation_config not in GENERATION_CONFIGS:
        result["router"]["generation_config"] = _absolute(generation_config)
    return result


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
