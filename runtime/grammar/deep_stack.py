"""Threads whose stacks are deep enough for what native code makes of a grammar."""

import threading
from collections.abc import Callable
from typing import Final, TypeVar

STACK_BYTES: Final = 8 * 1024 * 1024
"""With which a helper compiles. What is too deep for it ends the helper, not us."""
SAFE_STACK_BYTES: Final = 8 * STACK_BYTES
"""With which a process compiles that must not die, what a helper has survived. Untouched pages cost no memory."""

T = TypeVar("T")

_starting = threading.Lock()


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
