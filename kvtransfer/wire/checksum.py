"""xxh3_64 of every block of a message: the mode that proves, block by block, that what was sent is what arrived.

Where a block's heads go to several places, those of each place have a checksum of their own.
"""

from collections.abc import Iterable

import numpy as np
import xxhash

CHECKSUM_BYTES = 8


def block_checksums(pieces: Iterable[memoryview], block_bytes: int) -> bytes:
    """u64 LE per block; each piece is `block_bytes` of one block or more, one behind the other."""
    sums = [
        xxhash.xxh3_64_intdigest(piece[begin : begin + block_bytes])
        for piece in pieces
        for begin in range(0, len(piece), block_bytes)
    ]
    return np.array(sums, dtype="<u8").tobytes()


def mismatches(ours: bytes, theirs: bytes) -> list[int]:
    """Positions at which two lists of checksums of the same length differ."""
    return np.flatnonzero(np.frombuffer(ours, dtype="<u8") != np.frombuffer(theirs, dtype="<u8")).tolist()
