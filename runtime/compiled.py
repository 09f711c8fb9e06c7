"""Numeric loops compiled to machine code by numba: `compiled` decorates them, in the modules that own them.

They are compiled when their module is imported, and kept on disk for the next process: beside the source or, where
the source's folder is read-only, in the user's cache folder (NUMBA_CACHE_DIR names another). Loading all of them takes
0.2 s, compiling them about 3 s once per machine. Where nothing can be written, or others may write what is not beside
the source, each process compiles them: numba runs what it finds.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import numba
import numpy as np
from numba import types

from runtime.own_files import is_own

F = TypeVar("F", bound=Callable[..., Any])

HASHES: Final = types.Array(types.uint64, 1, "C", readonly=True)
"""u64 [n], read-only: also arrays over bytes."""

U64: Final = np.uint64
"""Wraps every constant that meets a u64, because numba makes a float of u64 and int."""


def compiled(*arguments: Any, returns: Any = numba.void) -> Callable[[F], F]:
    """`arguments` and `returns`: numba types. Invariant: what the function calls is `inlined` and stands in the same
    file, because the file's age decides whether the copy on disk is still good."""

    def compile_now(function: F) -> F:
        signature = returns(*arguments)
        try:
            kept: F = numba.njit(signature, cache=_may_keep(function))(function)
        except (RuntimeError, OSError, EOFError):  # no folder that can be written, no space, a broken copy
            kept = numba.njit(signature)(function)
        return kept

    return compile_now


def _may_keep(function: Callable[..., Any]) -> bool:
    """Whether nobody else can have written numba's copies. Raises RuntimeError when numba finds no folder for them."""
    folder = Path(numba.njit(None, cache=True)(function).stats.cache_path or os.devnull)
    return folder.parent == Path(function.__code__.co_filename).parent or is_own(folder)


def together(*parts: Any) -> Any:
    """The numba type of a tuple of `parts`, for an argument of `compiled`."""
    return types.Tuple(parts)  # type: ignore[no-untyped-call]


def inlined(function: F) -> F:
    """A part of compiled functions, compiled with each of them."""
    part: F = numba.njit(function)
    return part
