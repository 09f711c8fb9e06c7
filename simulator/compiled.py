"""What compiled simulations are made with: numba's settings, the times of steps, and histograms."""

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from runtime.config.step_times import decode_time, prefill_time, token_pairs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BUCKETS = 256  # of the histograms of TTFT and ITL, each 4 % wider than the last
BUCKET_LOG = np.log(1.04)

F = TypeVar("F", bound=Callable[..., Any])


def part(function: F, cache: bool = False) -> F:
    """A compiled function without reference counting, which would cost 40 % of the time; nothing is allocated here."""
    options: Any = {"_nrt": False, "cache": cache, "forceinline": not cache, "error_model": "numpy"}
    made: F = numba.njit(**options)(function)
    return made


def entry(function: F) -> F:
    """A compiled function that numba caches on disk, with all parts that it calls, where a folder can be written."""
    try:
        return part(function, cache=True)
    except RuntimeError:
        return part(function)


# Because numba's cache ignores changes of step_times.py and step_rule.py, tests compare the results with theirs.
prefill_seconds, decode_seconds, pairs_of = part(prefill_time), part(decode_time), part(token_pairs)


@part
def bucket(milliseconds: float) -> int:
    return min(BUCKETS - 1, max(0, int(np.log(max(milliseconds, 1.0)) / BUCKET_LOG)))
