"""What of a JSON schema llguidance is given, so that answers keep to it exactly, and how deep a schema may go."""

import math
from collections.abc import Mapping
from typing import Any, Final

FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Formats of strings that are enforced. JSON Schema calls all others annotations: they say nothing of an answer."""
MAX_DEPTH: Final = 1000
DEFINITIONS: Final = ("$defs", "definitions")
MAX_EXACT: Final = 2**53  # llguidance reads numbers as float64
MAX_BOUND: Final = 2**63 - 1024  # the largest float64 below 2^63; it refuses -2^63, the least of int64
NOT_SCHEMAS: Final = frozenset(("enum", "const", "default", "examples"))
NAMED_SCHEMAS: Final = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_LOWER = frozenset(("minimum", "exclusiveMinimum"))
_UPPER = frozenset(("maximum", "exclusiveMaximum"))


def enforced(schema: Any, path: str = "$") -> Any:
    """`schema` without unknown formats, and with bounds of numbers beyond 2^53 moved inwards to the next float64.
    Raises ValueError, which names the path, for constants beyond 2^53, and RecursionError."""
    if isinstance(schema, list):
        return [enforced(each, f"{path}[{i}]") for i, each in enumerate(schema)]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: _member(name, value, f"{path}.{name}")
        for name, value in schema.items()
        if not (name == "format" and isinstance(value, str) and value not in FORMATS)
    }


def _member(name: str, value: Any, path: str) -> Any:
    if name in NAMED_SCHEMAS and isinstance(value, Mapping):
        return {key: enforced(part, f"{path}.{key}") for key, part in value.items()}
    if name in _LOWER or name in _UPPER:
        return _inwards(value, name in _LOWER)
    if name not in NOT_SCHEMAS:
        return enforced(value, path)
    if name in ("enum", "const") and (number := _too_large(value)) is not None:
        raise ValueError(
            f"{path} has {number}, and integers beyond 2^53 are not followed exactly; write it as a string"
        )
    return value


def _inwards(bound: Any, lower: bool) -> Any:
    if not isinstance(bound, int) or abs(bound) <= MAX_EXACT:
        return bound
    if (bound < -MAX_BOUND) if lower else (bound > MAX_BOUND):
        return -MAX_BOUND if lower else MAX_BOUND
    nearest = float(max(-(2**63), min(bound, 2**63)))
    if (nearest < bound) if lower else (nearest > bound):
        nearest = math.nextafter(nearest, math.inf if lower else -math.inf)
    return int(nearest)


def _too_large(value: Any) -> int | None:
    """The first integer within that has no exact float64."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if abs(value) > MAX_EXACT else None
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next((number for part in parts if (number := _too_large(part)) is not None), None)


def check_depth(schema: Any) -> None:
    """Raises ValueError. Counts objects, lists and references from the root on; a definition counts where it is
    referred to first, as it is compiled."""
    seen: set[str] = set()
    ahead = [(schema, 1)]
    while ahead:
        value, depth = ahead.pop()
        if depth > MAX_DEPTH:
            problem = f"is nested more than {MAX_DEPTH} deep, references included; give it fewer levels"
            raise ValueError(problem)
        parts = list(value)
        if isinstance(value, dict):
            parts = [part for name, part in value.items() if name not in DEFINITIONS]
            reference = value.get("$ref")
            if isinstance(reference, str) and reference.startswith("#") and reference not in seen:
                seen.add(reference)
                parts.append(_found(schema, reference))
        ahead += [(part, depth + 1) for part in reversed(parts) if isinstance(part, dict | list)]


def _found(schema: Any, reference: str) -> Any:
    """What a JSON pointer leads to; None: nothing."""
    for name in reference.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        elif isinstance(schema, dict):
            schema = schema.get(name)
        else:
            return None
    return schema
