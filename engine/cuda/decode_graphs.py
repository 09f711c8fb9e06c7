"""CUDA graphs of whole decode steps, one per batch size: replaying a graph costs the host a single launch.

A batch runs in the smallest graph that holds it. Rows of padding store nothing and attend to nothing, and their tokens
are dropped. Steps with drafts, whose rows may see each other, have graphs of their own.
"""

from bisect import bisect_left
from collections.abc import Callable
from functools import partial

from engine.cuda.graph_recorder import GraphRecorder
from engine.drafts.speculation import FREE_ROWS

LARGEST_GRAPH = 512


def graph_sizes(max_rows: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, 40, ...: close together where one row of padding costs much."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, LARGEST_GRAPH + 1, 16)]
    largest = min(max_rows, LARGEST_GRAPH)
    return [*(size for size in sizes if size < largest), largest]


class DecodeGraphs:
    def __init__(self, max_rows: int, clear: Callable[[int], None], step: Callable[[int, bool], None]) -> None:
        """`step(rows, drafts)` runs a padded decode step whose inputs and outputs keep their addresses; `clear(rows)`
        fills its inputs with padding, so that steps during the capture store nothing."""
        self.sizes = graph_sizes(max_rows)
        self._graphs: dict[tuple[int, bool], Callable[[], None]] = {}
        most_drafted = self.size_for(FREE_ROWS) or max_rows
        with GraphRecorder() as recorder:
            for rows in reversed(self.sizes):  # the largest first: the others fit into its memory
                clear(rows)
                for drafts in (False, True) if 1 < rows <= most_drafted else (False,):
                    step(rows, drafts)  # loads and compiles kernels, which a capture must not do
                    self._graphs[rows, drafts] = recorder.record(partial(step, rows, drafts))

    def size_for(self, rows: int) -> int | None:
        """Rows of the smallest graph that holds the batch; None when no graph does."""
        index = bisect_left(self.sizes, rows)
        return self.sizes[index] if index < len(self.sizes) else None

    def replay(self, size: int, *, drafts: bool) -> None:
        """Replays a graph, in stream order."""
        self._graphs[size, drafts]()
