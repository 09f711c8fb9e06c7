"""Incarnations: one number for each life of a worker."""

import time


def new_incarnation() -> int:
    """Microseconds of Unix time: it rises with every start of a worker on one machine."""
    return time.time_ns() // 1000
