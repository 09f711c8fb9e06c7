"""The name of one life of a worker."""

import time

WorkerKey = tuple[str, int]
"""Worker id and incarnation. What a worker has cached ends with its incarnation."""


def new_incarnation() -> int:
    """Microseconds of Unix time: it rises with every start of a worker, unless the clock was set back meanwhile."""
    return time.time_ns() // 1000
