"""Where a JSON schema that cannot be followed goes wrong: its parts are tried one by one."""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from runtime.grammar.schemas import DEFINITIONS, NAMED_SCHEMAS, NOT_SCHEMAS

LOOKING_S: Final = 0.2  # of the thread's own time; only the words of a refusal depend on it
UNSATISFIABLE = "Unsatisfiable schema"
_TRIED_LAST = ("properties", "type")  # without them many an error vanishes that another keyword causes

ErrorOf = Callable[[Mapping[str, Any]], str]
"""What is wrong with a schema; empty: nothing."""


def find_fault(schema: Any, error: str, error_of: ErrorOf) -> tuple[str, str]:
    """(JSON path, error) of the innermost keyword that goes wrong as the whole schema does, with `error`."""
    if not isinstance(schema, Mapping):
        return "$", error
    until_s = time.thread_time() + LOOKING_S
    definitions = {name: schema[name] for name in DEFINITIONS if isinstance(schema.get(name), Mapping)}

    def error_in_time(known: Mapping[str, Any], part: Mapping[str, Any]) -> str | None:
        """The error of a part; None: there is no time left to try it."""
        return error_of({**part, **known}) if time.thread_time() < until_s else None

    # A part is at fault by itself before one is that refers to it, so definitions are tried first, and without others.
    rest = {name: value for name, value in schema.items() if name not in definitions}
    starts = [*_parts(definitions), ("", rest)]
    for known in ({name: dict.fromkeys(named, True) for name, named in definitions.items()}, definitions):
        told = partial(error_in_time, known)
        for path, start in starts:
            if _same(problem := told(start) or "", error):
                return _innermost(f"${path}", start, problem, told)
    return "$", error


def _innermost(
    path: str, schema: Mapping[str, Any], error: str, told: Callable[[Mapping[str, Any]], str | None]
) -> tuple[str, str]:
    def inner() -> tuple[str, Mapping[str, Any], str] | None:
        for name, part in _parts(schema):
            if _same(problem := told(part) or "", error):
                return name, part, problem
        return None

    while found := inner():
        name, schema, error = found
        path += name
    for keyword in sorted(schema, key=lambda name: (name in _TRIED_LAST, name == "type")):
        problem = told({name: value for name, value in schema.items() if name != keyword})
        if problem is not None and problem != error:
            return f"{path}.{keyword}", error
    return path, error


def _same(inner: str, outer: str) -> bool:
    """What is unsatisfiable makes what requires it unsatisfiable, in other words."""
    return bool(inner) and (inner == outer or (inner.startswith(UNSATISFIABLE) and outer.startswith(UNSATISFIABLE)))


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(path from the schema on, schema) of those right within it."""
    for name, value in schema.items():
        if name in NOT_SCHEMAS:
            continue
        if isinstance(value, Mapping):
            named = value.items() if name in NAMED_SCHEMAS else (("", value),)
            parts = [(f".{name}.{key}" if key else f".{name}", part) for key, part in named]
        else:
            parts = [(f".{name}[{i}]", part) for i, part in enumerate(value)] if isinstance(value, list) else []
        yield from ((path, part) for path, part in parts if isinstance(part, Mapping))
