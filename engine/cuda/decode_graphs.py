"""CUDA graphs of whole decode steps, one per batch size: replaying one costs the host a single launch.

A batch runs in the smallest graph that holds it; rows of padding store nothing, attend to nothing, and their tokens are
dropped. All graphs share one pool of memory, which is safe because they run one after the other.
"""

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

from engine.cuda.graph_recorder import GraphRecorder

LARGEST_GRAPH = 512


def graph_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, 40, ...: small steps where a padded row costs much."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, LARGEST_GRAPH + 1, 16)]
    largest = min(max_rows, LARGEST_GRAPH)
    return [*(size for size in sizes if size < largest), largest]


class DecodeGraphs:
    def __init__(self, max_rows: int, clear: Callable[[int], None], step: Callable[[int], None]) -> None:
        """`step(rows)` runs a padded decode step from and to memory that stays where it is; `clear(rows)` fills its
        inputs with padding before, so that nothing is stored or counted by a step that nobody asked for."""
        self.sizes = graph_sizes(max_rows)
        self._graphs: dict[int, Callable[[], None]] = {}
        with GraphRecorder() as recorder:
            for rows in reversed(self.sizes):  # the largest first: the others fit into its memory
                clear(rows)
                step(rows)  # loads and compiles what the capture must not
                self._graphs[rows] = recorder.record(partial(step, rows))

    def size_for(self, rows: int) -> int | None:
        """None: too many for any graph."""
        index = bisect_left(self.sizes, rows)
        return self.sizes[index] if index < len(self.sizes) else None

    def replay(self, size: int) -> None:
        """In stream order."""
        self._graphs[size]()
