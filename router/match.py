"""The answer of the radix tree to a query: how many leading blocks each worker holds.

Kept as a few (blocks, mask of workers) pairs until somebody asks for the workers by name.
"""

from collections.abc import Iterator, Mapping
from itertools import compress

import numpy as np

WorkerKey = tuple[str, int]
"""Worker id and incarnation: what a worker had cached ends with its incarnation."""


class Match(Mapping[WorkerKey, int]):
    """Number of leading blocks of the query that each worker holds; workers that hold none do not appear.

    To be read before the tree changes again.
    """

    __slots__ = ("_blocks", "_end", "_levels", "_names", "_sequences")

    def __init__(self, levels: list[tuple[int, int]], names: list[WorkerKey], sequences: bytes, end: int) -> None:
        """`sequences`: u64 LE sequence hashes of the edge where the query left the tree, `end` bytes into it."""
        self._levels = levels  # (blocks, mask of workers)
        self._names = names  # by bit number; bits of workers that left are in no mask
        self._sequences = sequences
        self._end = end
        self._blocks: dict[WorkerKey, int] | None = None

    @property
    def last_block(self) -> bytes:
        """Sequence hash (u64 LE) of the last block that matched; empty when none did."""
        return self._sequences[max(0, self._end - 8) : self._end]

    @property
    def longest(self) -> int:
        """Blocks of the longest match; 0 when there is none."""
        return max((blocks for blocks, _ in self._levels), default=0)

    def as_dict(self) -> dict[WorkerKey, int]:
        if self._blocks is None:
            self._blocks = {}
            for blocks, mask in self._levels:
                self._blocks.update(dict.fromkeys(compress(self._names, bits(mask)), blocks))
        return self._blocks

    def __getitem__(self, worker: WorkerKey) -> int:
        return self.as_dict()[worker]

    def __iter__(self) -> Iterator[WorkerKey]:
        return iter(self.as_dict())

    def __len__(self) -> int:
        return len(self.as_dict())

    def __repr__(self) -> str:
        return f"Match({self.as_dict()})"


def bits(mask: int) -> bytes:
    """One byte per bit, 0 or 1, the lowest bit first."""
    packed = np.frombuffer(mask.to_bytes(mask.bit_length() // 8 + 1, "little"), dtype=np.uint8)
    return np.unpackbits(packed, bitorder="little").tobytes()
