"""Where in the radix tree a sequence hash is: a hash table of 22 to 40 bytes per block, asked for whole runs of hashes.

The table never stops to grow: each change moves a part of the old table into the new one.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from router.index import hash_table

MIN_SLOTS: Final = 1024
MAX_LOAD: Final = 0.55  # share of the slots; beyond it searches get long
MIN_LOAD: Final = 0.15
GROWTH: Final = 1.8
MOVED_PER_KEY: Final = 8  # slots of an old table, which therefore gets new keys for at most an eighth of its slots

NOWHERE: Final = 0  # as an edge: the hash is not in the index


class BlockIndex:
    """Maps sequence hashes (u64, above 1) to edge numbers (u32, never 0)."""

    def __init__(self) -> None:
        self._count = 0
        self._keys, self._edges = _slots(MIN_SLOTS)
        self._forget_old()

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Size of the arrays."""
        return self._keys.nbytes + self._edges.nbytes + self._old_keys.nbytes + self._old_edges.nbytes

    def get(self, key: int) -> int:
        """Edge number of one hash, or NOWHERE."""
        edge = hash_table.get(self._keys, self._edges, np.uint64(key))
        if edge == NOWHERE and self._rebuilding:
            edge = hash_table.get(self._old_keys, self._old_edges, np.uint64(key))
        return int(edge)

    def insert(self, keys: NDArray[np.uint64], edge: int) -> bool:
        """Adds hashes [n]. False, and nothing has changed, when one is known already, twice in `keys`, or 0 or 1."""
        if self._count + len(keys) > MAX_LOAD * len(self._keys):
            self._move(len(self._old_keys))
            self._rebuild(int(GROWTH * (self._count + len(keys)) / MAX_LOAD) + 1)
        self._move(MOVED_PER_KEY * len(keys))  # first, so that the old table gets too few new keys to become full
        done = hash_table.insert(
            self._keys,
            self._edges,
            self._old_keys,
            self._old_edges,
            np.uint64(self._moved),
            keys,
            np.uint32(edge),
        )
        self._count += done
        if done < len(keys):
            self.remove(keys[:done])
        return done == len(keys)

    def repoint(self, keys: NDArray[np.uint64], edge: int) -> None:
        """Gives known hashes [n] another edge."""
        missing = hash_table.assign(self._keys, self._edges, self._old_keys, self._old_edges, keys, np.uint32(edge))
        assert not missing, "only known hashes are repointed"

    def remove(self, keys: NDArray[np.uint64]) -> None:
        """Takes out known hashes [n]."""
        missing = hash_table.remove(self._keys, self._edges, self._old_keys, keys)
        assert not missing, "only known hashes are removed"
        self._count -= len(keys)
        self._move(MOVED_PER_KEY * len(keys))
        if not self._rebuilding and self._count < MIN_LOAD * len(self._keys) > MIN_LOAD * MIN_SLOTS:
            self._rebuild(max(MIN_SLOTS, len(self._keys) // 2))

    @property
    def _rebuilding(self) -> bool:
        return self._moved < len(self._old_keys)

    def _rebuild(self, num_slots: int) -> None:
        """Begins to move all hashes to a table of another size."""
        self._old_keys, self._old_edges, self._moved = self._keys, self._edges, 0
        self._keys, self._edges = _slots(num_slots)

    def _move(self, num_slots: int) -> None:
        if not self._rebuilding:
            return
        first, self._moved = self._moved, min(self._moved + num_slots, len(self._old_keys))
        hash_table.move(self._keys, self._edges, self._old_keys, self._old_edges, first, self._moved)
        if not self._rebuilding:
            self._forget_old()

    def _forget_old(self) -> None:
        self._old_keys, self._old_edges = _slots(1)  # empty: searches end in it at once
        self._moved = 1


def _slots(number: int) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    return np.zeros(number, dtype=np.uint64), np.zeros(number, dtype=np.uint32)
