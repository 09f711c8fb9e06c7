"""Changes on top of a configuration, checked like the file itself."""

from typing import Any

import msgspec

from runtime.config.serving import ServingConfig, parse_config


def with_overrides(config: ServingConfig, overrides: dict[str, Any], where: str = "command line") -> ServingConfig:
    """`overrides`: any part of serving.yaml. Raises ConfigError naming the key."""
    return parse_config(merged(msgspec.to_builtins(config), overrides), where)


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        inner = base.get(key)
        result[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result
