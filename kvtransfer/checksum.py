"""xxh3_64 of every block of a message: the mode that proves, block by block, that what was sent is what arrived."""

from collections.abc import Sequence

import numpy as np
import xxhash

from kvtransfer.layout import SlabLayout


def block_checksums(buffer: memoryview, layout: SlabLayout, layer: int, blocks: Sequence[int]) -> bytes:
    """u64 LE per block."""
    sums = np.empty(len(blocks), dtype="<u8")
    for index, block in enumerate(blocks):
        begin = layout.offset(layer, block)
        sums[index] = xxhash.xxh3_64_intdigest(buffer[begin : begin + layout.block_bytes])
    return sums.tobytes()


def mismatches(ours: bytes, theirs: bytes) -> list[int]:
    """Positions at which two lists of checksums of the same length differ."""
    return np.flatnonzero(np.frombuffer(ours, dtype="<u8") != np.frombuffer(theirs, dtype="<u8")).tolist()
