"""Incarnations: which start of a worker something belongs to."""

import time


def new_incarnation() -> int:
    """Rises with every start of a worker on one machine, without anything to remember: microseconds of Unix time."""
    return time.time_ns() // 1000
