"""Python's garbage collector in a process that serves many requests, each of which leaves hardly any cycles."""

import gc

COLLECT_AFTER = (50_000, 20, 100)  # new objects, then collections of the younger generation


def collect_seldom() -> None:
    """Makes the collector run less often. Little memory is lost."""
    gc.set_threshold(*COLLECT_AFTER)


def calm_collector() -> None:
    """Makes the collector visit only objects that are created from now on, and run less often. Called when the process
    is ready: a full collection takes 0.5 s when a router's tree has a million blocks."""
    gc.collect()
    gc.freeze()
    collect_seldom()
