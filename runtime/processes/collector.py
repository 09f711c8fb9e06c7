"""Python's garbage collector in a process that serves many requests, each of which leaves hardly any cycles."""

import gc

COLLECT_AFTER = (10_000, 100, 100)  # new objects, which take 4 ms, then collections of the younger generation


def calm_collector() -> None:
    """Makes the collector run less often, from when the process is ready. Little memory is lost; a full collection
    takes 0.5 s when a router's tree has a million blocks."""
    gc.collect()
    gc.freeze()  # the collector never visits what exists now
    gc.set_threshold(*COLLECT_AFTER)
