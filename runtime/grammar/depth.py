"""How deep a JSON schema goes, and a thread whose stack is deep enough for what native code makes of it."""

import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

MAX_DEPTH: Final = 1000
STACK_BYTES: Final = 8 * 1024 * 1024
"""With which a helper compiles. What is too deep for it ends the helper, not us."""
SAFE_STACK_BYTES: Final = 8 * STACK_BYTES
"""With which a process compiles that must not die, what a helper has survived. Untouched pages cost no memory."""

DEFINITIONS: Final = ("$defs", "definitions")

T = TypeVar("T")

_starting = threading.Lock()


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


def on_deep_stack(work: Callable[[], T], stack_bytes: int) -> T:
    """Runs `work` on a thread of its own. Raises what it raises."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # a panic of Rust is no Exception
            errors.append(error)

    with _starting:  # the size holds for all threads that start meanwhile
        before = threading.stack_size(stack_bytes)
        try:
            thread = threading.Thread(target=run, name="grammar")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
