"""xxh3_64 of every block of a message: the mode that proves, block by block, that what was sent is what arrived.

Where a block's heads go to several places, those of each place have a checksum of their own.
"""

from collections.abc import Sequence

import numpy as np
import xxhash

from kvtransfer.layout import SlabLayout

CHECKSUM_BYTES = 8


def block_checksums(buffer: memoryview, layout: SlabLayout, layer: int, blocks: Sequence[int], heads: range) -> bytes:
    """u64 LE per block, of some of its heads."""
    sums = np.empty(len(blocks), dtype="<u8")
    for index, block in enumerate(blocks):
        begin = layout.offset(layer, block, heads.start)
        sums[index] = xxhash.xxh3_64_intdigest(buffer[begin : begin + len(heads) * layout.head_bytes])
    return sums.tobytes()


def mismatches(ours: bytes, theirs: bytes) -> list[int]:
    """Positions at which two lists of checksums of the same length differ."""
    return np.flatnonzero(np.frombuffer(ours, dtype="<u8") != np.frombuffer(theirs, dtype="<u8")).tolist()
