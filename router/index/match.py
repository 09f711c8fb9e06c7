"""The answer of the radix tree to a query: how many leading blocks each worker holds.

It is kept as a few (blocks, workers) pairs until somebody asks for a column or a worker.
"""

from collections.abc import Iterator, Mapping
from itertools import compress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from baton_proto.kv_events import HASH_BYTES
from router.index.holders import Holders, bits
from runtime.discovery.worker_key import WorkerKey

NONE_LOWER: Final = np.empty((2, 0), dtype=np.int32)


class Match(Mapping[WorkerKey, int]):
    """Number of leading blocks of the query that each worker holds; workers that hold none do not appear.

    It must be read before the tree changes again.
    """

    __slots__ = ("_alone", "_blocks", "_end", "_holders", "_levels", "_sequences")

    def __init__(
        self, levels: list[tuple[int, int]], alone: list[tuple[int, int]], holders: Holders, sequences: bytes, end: int
    ) -> None:
        """`sequences`: u64 LE sequence hashes of the edge where the query left the tree, `end` bytes into it."""
        self._levels = levels  # (blocks, mask of bits)
        self._alone = alone  # (blocks, number of a bit that is in no mask)
        self._holders = holders  # bits of workers that left are in no mask
        self._sequences = sequences
        self._end = end
        self._blocks: dict[WorkerKey, int] | None = None

    @property
    def last_block(self) -> bytes:
        """Sequence hash (u64 LE) of the last block that matched; empty when none did."""
        return self._sequences[max(0, self._end - HASH_BYTES) : self._end]

    def column(self, workers: tuple[WorkerKey, ...]) -> NDArray[np.int32]:
        """Blocks that each of the workers holds: [n] -> [n]."""
        held: NDArray[np.int32] = self._by_bit()[self._holders.numbers(workers)]
        return held

    def lower(self, workers: tuple[WorkerKey, ...]) -> NDArray[np.int32]:
        """Blocks of `column` that lie in host memory and on disk: [n] -> [2, n]; NONE_LOWER when no worker has any."""
        if not self._holders.nearer:
            return NONE_LOWER
        as_near: NDArray[np.int32] = self._by_bit()[self._holders.numbers_at()[:, self._holders.numbers(workers)]]
        return np.ascontiguousarray(np.diff(as_near, axis=0))

    def _by_bit(self) -> NDArray[np.int32]:
        blocks = np.zeros(len(self._holders.names) + 1, dtype=np.int32)  # the last one is NOBODY's
        for level, mask in self._levels:
            blocks[: mask.bit_length()][bits(mask)] = level
        for level, number in self._alone:
            blocks[number] = level
        return blocks

    def as_dict(self) -> dict[WorkerKey, int]:
        if self._blocks is None:
            names, nearer = self._holders.names, self._holders.nearer
            self._blocks = {names[number]: blocks for blocks, number in self._alone if not nearer >> number & 1}
            for blocks, mask in self._levels:
                self._blocks.update(dict.fromkeys(compress(names, bits(mask & ~nearer).tobytes()), blocks))
        return self._blocks

    def __getitem__(self, worker: WorkerKey) -> int:
        return self.as_dict()[worker]

    def __iter__(self) -> Iterator[WorkerKey]:
        return iter(self.as_dict())

    def __len__(self) -> int:
        return len(self.as_dict())

    def __repr__(self) -> str:
        return f"Match({self.as_dict()})"


def column(held: Mapping[WorkerKey, int], workers: tuple[WorkerKey, ...]) -> NDArray[np.int32]:
    """Match.column for any mapping."""
    if isinstance(held, Match):
        return held.column(workers)
    return np.array([held.get(worker, 0) for worker in workers], dtype=np.int32)
