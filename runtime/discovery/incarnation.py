"""Incarnations: one number for each life of a worker."""

import time


def new_incarnation() -> int:
    """Microseconds of Unix time: it rises with every start of a worker, unless the clock was set back meanwhile."""
    return time.time_ns() // 1000
