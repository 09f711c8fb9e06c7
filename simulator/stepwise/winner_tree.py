"""Tournament trees: which of the workers has the least key, after each change in the time of a few comparisons.

Each row of `trees` [rows, nodes] is a tree of its own over the same workers. A node has the least key of the leaves
below it and its worker; node 0 is the root, and node n has the children 4n + 1 to 4n + 4, which share a cache line. Of
equal keys the left one wins. numba compiles `change`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.compiled import part

NODE = np.dtype([("key", "f8"), ("worker", "i8")])
Trees = NDArray[np.void]


def new_trees(rows: int, workers: int) -> Trees:
    """Trees for `workers` of them, in which every key is infinite."""
    levels = max(1, int(np.ceil(np.log2(max(2, workers)) / 2)))
    first = (4**levels - 1) // 3
    trees = np.zeros((rows, first + 4**levels), NODE)
    trees["key"] = np.inf
    trees["worker"][:, first:] = np.arange(4**levels)
    for node in range(first - 1, -1, -1):
        trees["worker"][:, node] = trees["worker"][:, 4 * node + 1]
    return trees


@part
def change(row: int, worker: int, key: float, trees: Any) -> None:
    """Gives a worker another key. Stops below the first match that ends as it did before."""
    node = (trees.shape[1] - 1) // 4 + worker  # its leaf
    tree = trees[row]
    if tree[node].key == key:
        return
    tree[node].key = key
    while node:
        node = (node - 1) >> 2
        first = 4 * node + 1
        a, b, c, d = tree[first].key, tree[first + 1].key, tree[first + 2].key, tree[first + 3].key
        # Without branches, because nobody can predict who wins.
        left, right = (b < a) * 1, 2 + (d < c) * 1
        right_wins = (min(c, d) < min(a, b)) * 1
        winner = tree[first + left + right_wins * (right - left)]
        above = tree[node]
        if above.key == winner.key and above.worker == winner.worker:
            return
        above.key, above.worker = winner.key, winner.worker


@part
def key_of(row: int, worker: int, trees: Any) -> Any:
    return trees[row, (trees.shape[1] - 1) // 4 + worker].key
