"""Where in the radix tree a sequence hash is: a hash table in numpy arrays, about 25 bytes per block.

Used by router/radix_tree.py alone, always with whole runs of hashes. Sequence hashes are uniformly distributed, so
their own bits choose the bucket. A bucket has 8 slots that are searched in one vector comparison; the few hashes that
find their bucket full live in a dict.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

SLOTS: Final = 8  # per bucket
MIN_BUCKETS: Final = 128
MAX_LOAD: Final = 0.65  # beyond it too many buckets are full
MIN_LOAD: Final = 0.15
GROWTH: Final = 1.5
REBUILD_ROUND: Final = 1 << 16  # hashes that move at once when the table is rebuilt

NOWHERE: Final = 0  # as an edge: the hash is not here

_SHIFT_32: Final = np.uint64(32)


class BlockIndex:
    """Maps sequence hashes (u64, never 0) to edge numbers (u32, never 0)."""

    _keys: NDArray[np.uint64]  # [buckets, slots]
    _edges: NDArray[np.uint32]  # [buckets, slots]; NOWHERE: the slot is free
    _overflow: dict[int, int]  # what found its bucket full
    _count: int

    def __init__(self) -> None:
        self._allocate(MIN_BUCKETS)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Of the arrays."""
        return self._keys.nbytes + self._edges.nbytes

    def get(self, key: int) -> int:
        """Edge of one hash, or NOWHERE."""
        bucket = (key >> 32) * len(self._keys) >> 32
        keys = self._keys[bucket].tolist()
        if key in keys:
            return int(self._edges[bucket, keys.index(key)])
        return self._overflow.get(key, NOWHERE)

    def get_many(self, keys: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """Edges of hashes [n] -> [n], NOWHERE for unknown ones."""
        buckets = self._buckets(keys)
        slots, found = self._slots(buckets, keys)
        edges = self._edges[buckets, slots]
        if not found.all():
            for i in np.flatnonzero(~found).tolist():
                edges[i] = self._overflow.get(int(keys[i]), NOWHERE)
        return edges

    def contains_any(self, keys: NDArray[np.uint64]) -> bool:
        """Whether at least one of the hashes [n] is here."""
        _, found = self._slots(self._buckets(keys), keys)
        return bool(found.any()) or not self._overflow.keys().isdisjoint(keys.tolist())

    def insert(self, keys: NDArray[np.uint64], edge: int) -> None:
        """Adds distinct hashes [n] that are not here yet."""
        needed = self._count + len(keys)
        if needed > MAX_LOAD * self._keys.size:
            self._rebuild(max(int(len(self._keys) * GROWTH), int(needed / MAX_LOAD / SLOTS) + 1))
        self._count = needed
        self._place(keys, np.full(len(keys), edge, dtype=np.uint32))

    def repoint(self, keys: NDArray[np.uint64], edge: int) -> None:
        """Gives hashes [n] that are here another edge."""
        buckets = self._buckets(keys)
        slots, found = self._slots(buckets, keys)
        if found.all():
            self._edges[buckets, slots] = edge
            return
        self._edges[buckets[found], slots[found]] = edge
        for key in keys[~found].tolist():
            assert key in self._overflow, "only known hashes are repointed"
            self._overflow[key] = edge

    def remove(self, keys: NDArray[np.uint64]) -> None:
        """Takes out hashes [n] that are here."""
        buckets = self._buckets(keys)
        slots, found = self._slots(buckets, keys)
        if not found.all():
            for key in keys[~found].tolist():
                del self._overflow[key]
            buckets, slots = buckets[found], slots[found]
        self._keys[buckets, slots] = 0
        self._edges[buckets, slots] = NOWHERE
        self._count -= len(keys)
        if len(self._keys) > MIN_BUCKETS and self._count < MIN_LOAD * self._keys.size:
            self._rebuild(max(MIN_BUCKETS, len(self._keys) // 2))

    def _allocate(self, num_buckets: int) -> None:
        self._keys = np.zeros((num_buckets, SLOTS), dtype=np.uint64)
        self._edges = np.zeros((num_buckets, SLOTS), dtype=np.uint32)
        self._overflow = {}
        self._count = 0

    def _buckets(self, keys: NDArray[np.uint64]) -> NDArray[np.intp]:
        """High 32 bits of the hash, scaled to the number of buckets: [n] -> [n]."""
        buckets: NDArray[np.uint64] = (keys >> _SHIFT_32) * np.uint64(len(self._keys)) >> _SHIFT_32
        return buckets.astype(np.intp)

    def _slots(self, buckets: NDArray[np.intp], keys: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Slot of each hash in its bucket [n] and whether it is there [n]; the slot of one that is not there means
        nothing."""
        equal = self._keys.take(buckets, axis=0) == keys[:, None]
        return equal.argmax(axis=1), equal.any(axis=1)

    def _place(self, keys: NDArray[np.uint64], edges: NDArray[np.uint32]) -> None:
        """Writes hashes into free slots of their buckets. Of several that compete for a slot the last one wins, the
        others try the next free slot in another round."""
        buckets = self._buckets(keys)
        while len(keys):
            free = self._edges.take(buckets, axis=0) == NOWHERE
            slots = free.argmax(axis=1)
            room = free.any(axis=1)
            if not room.all():
                full = ~room
                self._overflow.update(zip(keys[full].tolist(), edges[full].tolist(), strict=True))
                keys, edges, buckets, slots = keys[room], edges[room], buckets[room], slots[room]
            self._keys[buckets, slots] = keys
            self._edges[buckets, slots] = edges
            lost = self._keys[buckets, slots] != keys
            if not lost.any():
                return
            keys, edges, buckets = keys[lost], edges[lost], buckets[lost]

    def _rebuild(self, num_buckets: int) -> None:
        old_keys, old_edges, old_overflow, count = self._keys.ravel(), self._edges.ravel(), self._overflow, self._count
        self._allocate(num_buckets)
        self._count = count
        for start in range(0, len(old_keys), REBUILD_ROUND):
            edges = old_edges[start : start + REBUILD_ROUND]
            used = edges != NOWHERE
            self._place(old_keys[start : start + REBUILD_ROUND][used], edges[used])
        self._place(
            np.fromiter(old_overflow.keys(), dtype=np.uint64, count=len(old_overflow)),
            np.fromiter(old_overflow.values(), dtype=np.uint32, count=len(old_overflow)),
        )
