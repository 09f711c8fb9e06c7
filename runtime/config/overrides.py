"""Changes on top of a configuration, checked like the file itself."""

from typing import Any

import msgspec
import yaml

from runtime.config.serving import ServingConfig, parse_config
from runtime.errors import ConfigError


def with_overrides(config: ServingConfig, overrides: dict[str, Any], where: str = "command line") -> ServingConfig:
    """`overrides`: any part of serving.yaml. Raises ConfigError naming the key."""
    return parse_config(merged(msgspec.to_builtins(config), overrides), where)


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        inner = base.get(key)
        result[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


def nested(setting: str) -> dict[str, Any]:
    """'engine.block_size=32' -> {"engine": {"block_size": 32}}. The value is YAML. Raises ConfigError."""
    key, equals, text = setting.partition("=")
    names = key.split(".")
    if not equals or not all(names):
        raise ConfigError("--set", f"{setting!r} is not KEY=VALUE such as engine.block_size=32")
    try:
        value: Any = text if text == "-" else yaml.safe_load(text)  # which is a list to YAML
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {key}", f"{text!r} is no value: {error}") from error
    for name in reversed(names):
        value = {name: value}
    return dict(value)
