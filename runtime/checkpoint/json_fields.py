"""Numbers of a JSON object, each under its key, checked."""

from typing import Any

from runtime.errors import ModelError


def size(data: dict[str, Any], key: str, model: str, default: int | None = None) -> int:
    """A positive integer. Raises ModelError."""
    return int(_positive(data, key, model, default, int, "integer"))


def number(data: dict[str, Any], key: str, model: str, default: float | None = None) -> float:
    """A positive number. Raises ModelError."""
    return float(_positive(data, key, model, default, (int, float), "number"))


def _positive(data: dict[str, Any], key: str, model: str, default: Any, kind: Any, name: str) -> Any:
    value = default if data.get(key) is None else data[key]
    if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ModelError(model, f"config.json: {key} is {value!r}, not a positive {name}")
    return value
