"""Edges of a tree over block hashes: each is a run of blocks, compared with a query in one step.

Runs are bytes of u64 LE hashes: compared, cut and joined as strings.
"""

from typing import Final, Self

import numpy as np

from baton_proto.kv_events import HASH_BYTES

HASH: Final = np.dtype("<u8")


class Run:
    """A run of blocks in a tree. It stands under its parent by its first block hash."""

    __slots__ = ("blocks", "children", "parent")

    def __init__(self, parent: Self | None, blocks: bytes) -> None:
        self.parent = parent
        self.blocks = blocks  # u64 LE hashes
        self.children: dict[bytes, Self] | None = None  # by first block hash; None when there are none
        self.attach()

    def attach(self) -> None:
        """Takes the place under its parent, perhaps that of another run with the same first block."""
        if self.parent is not None:
            if self.parent.children is None:
                self.parent.children = {}
            self.parent.children[self.blocks[:HASH_BYTES]] = self  # type: ignore[assignment]  # parents are of the same class

    def detach(self) -> None:
        assert self.parent is not None, "the root stays"
        assert self.parent.children is not None
        del self.parent.children[self.blocks[:HASH_BYTES]]
        self.parent.children = self.parent.children or None

    def step(self, query: bytes, position: int) -> tuple[Self, int] | None:
        """The child that goes on as the query does from `position`, and the bytes they share; None: there is none."""
        if self.children is None:
            return None
        child = self.children.get(query[position : position + HASH_BYTES])
        if child is None:
            return None
        if query.startswith(child.blocks, position):
            return child, len(child.blocks)
        return child, common_bytes(child.blocks, 0, query, position)


class Edge(Run):
    """A run of the radix tree and, per worker, how much of it the worker holds.

    Invariants: at least one worker covers the last block; whoever covers anything of a child covers all of its parent.
    """

    __slots__ = ("full", "number", "partial", "sequences")

    def __init__(self, number: int, parent: "Edge | None", blocks: bytes, sequences: bytes, full: int) -> None:
        super().__init__(parent, blocks)
        self.number = number  # in the block index; NOWHERE once the edge is gone
        self.sequences = sequences  # u64 LE, one per block
        self.full = full  # mask of the workers that cover the whole run
        self.partial: dict[int, int] | None = None  # bit number -> bytes of `blocks` that it covers, less than all

    def covered(self, bit: int) -> int:
        """Bytes of `blocks` that a worker covers."""
        if self.full >> bit & 1:
            return len(self.blocks)
        return self.partial.get(bit, 0) if self.partial else 0

    def cover(self, bit: int, length: int) -> int:
        """Raises a worker's coverage to `length` bytes. Returns by how much it rose."""
        rise = length - self.covered(bit)
        if rise <= 0:
            return 0
        self._set(bit, length)
        return rise

    def uncover(self, bit: int, length: int) -> int:
        """Lowers a worker's coverage to `length` bytes. Returns by how much it fell."""
        fall = self.covered(bit) - length
        if fall <= 0:
            return 0
        self._set(bit, length)
        return fall

    def _set(self, bit: int, length: int) -> None:
        mask = 1 << bit
        if length == len(self.blocks):
            self.full |= mask
        else:
            self.full &= ~mask
        if 0 < length < len(self.blocks):
            self.partial = self.partial or {}
            self.partial[bit] = length
        elif self.partial:
            self.partial.pop(bit, None)
            self.partial = self.partial or None


def find_hash(hashes: bytes, wanted: bytes) -> int:
    """Byte offset of a hash in a run that holds it."""
    offset = hashes.index(wanted)
    while offset % HASH_BYTES:  # found across two hashes
        offset = hashes.index(wanted, offset + 1)
    return offset


def common_bytes(a: bytes, a_from: int, b: bytes, b_from: int) -> int:
    """Length of the common prefix, in whole hashes, of two runs from their offsets on."""
    if a[a_from : a_from + HASH_BYTES] != b[b_from : b_from + HASH_BYTES]:
        return 0
    length = min(len(a) - a_from, len(b) - b_from)
    if a[a_from : a_from + length] == b[b_from : b_from + length]:
        return length
    count = length // HASH_BYTES
    hashes_a = np.frombuffer(a, dtype=HASH, count=count, offset=a_from)
    hashes_b = np.frombuffer(b, dtype=HASH, count=count, offset=b_from)
    return int((hashes_a != hashes_b).argmax()) * HASH_BYTES


def common_end(a: bytes, a_to: int, b: bytes, b_to: int) -> int:
    """Length of the common suffix, in whole hashes, of two runs up to their offsets."""
    length = min(a_to, b_to)
    if a[a_to - length : a_to] == b[b_to - length : b_to]:
        return length
    count = length // HASH_BYTES
    hashes_a = np.frombuffer(a, dtype=HASH, count=count, offset=a_to - length)[::-1]
    hashes_b = np.frombuffer(b, dtype=HASH, count=count, offset=b_to - length)[::-1]
    return int((hashes_a != hashes_b).argmax()) * HASH_BYTES
