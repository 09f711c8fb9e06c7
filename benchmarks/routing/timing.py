"""How both halves time a call and measure memory.

Standard library only, because this module also runs in the peer's environment.
"""

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

MIN_CALLS = 5


def sample_us(call: Callable[[], object], budget_s: float) -> list[float]:
    """Microseconds of each of many calls, for `budget_s` in all."""
    clock = time.perf_counter_ns
    samples: list[float] = []
    end_ns = clock() + int(budget_s * 1e9)
    begin_ns = clock()
    while begin_ns < end_ns or len(samples) < MIN_CALLS:
        begin_ns = clock()
        call()
        samples.append((clock() - begin_ns) / 1e3)
    return samples


def rss_bytes() -> int:
    """Resident memory of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
