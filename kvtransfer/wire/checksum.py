"""xxh3_64 of every block of a message: proves, block by block, that what was sent is what arrived.

When a block's heads are sent in several parts, each part has a checksum of its own.
"""

from collections.abc import Iterable

import numpy as np
import xxhash

CHECKSUM_BYTES = 8


def block_checksums(pieces: Iterable[memoryview], block_bytes: int) -> bytes:
    """One u64 LE per block. A piece holds `block_bytes` of each of one or more blocks, one behind the other."""
    sums = [
        xxhash.xxh3_64_intdigest(piece[begin : begin + block_bytes])
        for piece in pieces
        for begin in range(0, len(piece), block_bytes)
    ]
    return np.array(sums, dtype="<u8").tobytes()


def mismatches(ours: bytes, theirs: bytes) -> list[int]:
    """Positions at which two lists of checksums of the same length differ."""
    return np.flatnonzero(np.frombuffer(ours, dtype="<u8") != np.frombuffer(theirs, dtype="<u8")).tolist()
