"""Numeric loops compiled to machine code by numba: `compiled` decorates them, in the modules that own them.

`load_compiled` loads them all, because importing numba costs 0.5 s of CPU and loading its code 0.2 s: a process calls
it in a thread before it serves. A loop that is called before that loads itself. Machine code is made once per machine,
which takes some seconds, and kept beside the source or, where the source's folder is read-only, in the user's cache
folder (NUMBA_CACHE_DIR names another). Where nothing can be written, or others may write what is not beside the source,
each process compiles: numba runs what it finds.
"""

import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from runtime.own_files import is_own

F = TypeVar("F", bound=Callable[..., Any])

HASHES: Final = "Array(uint64, 1, 'C', readonly=True)"
"""The numba type of u64 [n], read-only: also arrays over bytes."""

U64: Final = np.uint64
"""Wraps every constant that meets a u64, because numba makes a float of u64 and int."""

_loaders: list[Callable[[], Any]] = []
_parts: list[Callable[..., Any]] = []
_lock = threading.RLock()


def load_compiled() -> None:
    """Loads all loops of the modules that are imported. From any thread; again: nothing."""
    for load in _loaders:
        load()


def compiled(signature: str) -> Callable[[F], F]:
    """`signature`: of numba's types, such as "int64(uint64[::1])". Invariant: what the function calls is `inlined` and
    stands in the same file, because the file's age decides whether the copy on disk is still good. Callers reach the
    function through its module (`hash_table.get`), where the machine code takes its place."""

    def decorate(function: F) -> F:
        @functools.cache
        def load() -> Any:
            with _lock:
                made = _made(function, signature)
            if function.__globals__.get(function.__name__) is first_call:
                function.__globals__[function.__name__] = made
            return made

        @functools.wraps(function)
        def first_call(*arguments: Any) -> Any:
            return load()(*arguments)

        _loaders.append(load)
        return first_call  # type: ignore[return-value]

    return decorate


def inlined(function: F) -> F:
    """A part of compiled functions, compiled into each of them."""
    _parts.append(function)
    return function


def _made(function: Callable[..., Any], signature: str) -> Any:
    import numba
    import numpy.ma  # noqa: F401  (here, because the first call of machine code with an array imports it)
    from numba.extending import register_jitable

    while _parts:
        register_jitable(forceinline=True)(_parts.pop())
    try:
        return numba.njit(signature, cache=_may_keep(function))(function)
    except (RuntimeError, OSError, EOFError):  # no folder that can be written, no space, a broken copy
        return numba.njit(signature)(function)


def _may_keep(function: Callable[..., Any]) -> bool:
    """Whether nobody else can have written numba's copies. Raises RuntimeError when numba finds no folder for them."""
    import numba

    folder = Path(numba.njit(None, cache=True)(function).stats.cache_path or os.devnull)
    return folder.parent == Path(function.__code__.co_filename).parent or is_own(folder)
