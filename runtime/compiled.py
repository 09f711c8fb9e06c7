"""Numeric loops compiled to machine code by numba: `compiled` decorates them, in the modules that own them.

They are compiled when their module is imported, and kept on disk for the next process: beside the source or, where
that cannot be written, in the user's cache folder (NUMBA_CACHE_DIR names another). Loading them takes 0.2 s, compiling
them all about 3 s, once per machine. Where nothing can be written they are compiled in each process anew.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import numba
import numpy as np
from numba import types

F = TypeVar("F", bound=Callable[..., Any])

HASHES: Final = types.Array(types.uint64, 1, "C", readonly=True)
"""u64 [n] that is only read. Of arrays over bytes, too."""

U64: Final = np.uint64
"""For every constant that meets a u64: numba makes a float of u64 and int."""


def compiled(*arguments: Any, returns: Any = numba.void) -> Callable[[F], F]:
    """Arguments and result as numba types. What the function calls must be `inlined` and stand in the same file, whose
    age decides whether the copy on disk is still good."""

    def compile_now(function: F) -> F:
        signature = returns(*arguments)
        try:
            kept: F = numba.njit(signature, cache=True)(function)
        except (RuntimeError, OSError, EOFError):  # no folder that can be written, no space, a broken copy
            kept = numba.njit(signature)(function)
        return kept

    return compile_now


def together(*parts: Any) -> Any:
    """The numba type of a tuple of `parts`, for an argument of `compiled`."""
    return types.Tuple(parts)  # type: ignore[no-untyped-call]


def inlined(function: F) -> F:
    """A part of compiled functions. Compiled with each of them."""
    part: F = numba.njit(function)
    return part
