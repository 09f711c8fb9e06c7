"""Block and sequence hashes of token lists: the names under which KV blocks are known all over the cluster.

Engines hash the blocks that they compute to publish them. The router hashes whole prompts, many a second, to look them
up in its radix tree, with xxh3.py: the same block hashes compiled, which costs a process 0.7 s of CPU to load.
Definitions, bit-exact with NVIDIA Dynamo 1.6:

- block hash: xxh3_64 over the block's token ids as little-endian u32, seed 1337; full blocks only
- sequence hash: s_0 = h_0, s_i = xxh3_64(LE64(s_(i-1)) + LE64(h_i), seed 1337); names a block together with its prefix
- LoRA: the block hash's seed becomes (1337 + xxh3_64(adapter name, seed 0)) mod 2^64

Beyond Dynamo, a request with a cache salt has a seed of its own, which takes the place of 1337. Hence only requests
with the same salt share blocks. A block that images touch is named by its tokens, and by the name and place of each
image in turn.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from baton_proto.images import Image
from baton_proto.kv_events import DEFAULT_HASH_SEED, MAX_HASH_SEED

SEED: Final = DEFAULT_HASH_SEED
MASK_64: Final = 2**64 - 1
TOKEN: Final = np.dtype("<u4")

_LINK: Final = struct.Struct("<QQ")
_PLACE: Final = struct.Struct("<Qq")


def block_hashes(tokens: NDArray[np.uint32], block_size: int, seed: int = SEED) -> NDArray[np.uint64]:
    """Hashes of the full blocks of `tokens` [num_tokens] -> [num_tokens // block_size]."""
    data = np.ascontiguousarray(tokens, dtype=TOKEN).view(np.uint8).data
    size = block_size * TOKEN.itemsize
    starts = range(0, len(data) - size + 1, size)
    return np.array([xxhash.xxh3_64_intdigest(data[start : start + size], seed) for start in starts], dtype=np.uint64)


def sequence_hashes(hashes: NDArray[np.uint64], parent: int | None = None) -> NDArray[np.uint64]:
    """Chains block hashes [n] -> [n]. `parent`: sequence hash of the block before the first; None: there is none."""
    chained = []
    for block_hash in hashes.tolist():
        parent = block_hash if parent is None else xxhash.xxh3_64_intdigest(_LINK.pack(parent, block_hash), SEED)
        chained.append(parent)
    return np.array(chained, dtype=np.uint64)


def with_image(block_hash: int, name: str, offset: int) -> int:
    """The hash of a block that an image touches. `offset`: of the image's first token from the block's first one;
    negative where the image begins in an earlier block."""
    return xxhash.xxh3_64_intdigest(_PLACE.pack(block_hash, offset) + name.encode(), SEED)


def with_images(
    hashes: NDArray[np.uint64], images: Sequence[Image], block_size: int, first: int = 0
) -> NDArray[np.uint64]:
    """The hashes [n] of the blocks from `first` on, with the images that touch them."""
    named = hashes.copy() if images else hashes
    for image in images:
        end = min(first + len(hashes), -(-(image.offset + image.length) // block_size))
        for block in range(max(first, image.offset // block_size), end):
            offset = image.offset - block * block_size
            named[block - first] = with_image(int(named[block - first]), image.name, offset)
    return named


def lora_seed(name: str, seed: int = SEED) -> int:
    """Seed of the block hashes of requests that use the LoRA adapter `name`, because their KV differs. `seed`: theirs
    without one, and the result where the name is empty."""
    return (seed + xxhash.xxh3_64_intdigest(name.encode())) & MASK_64 if name else seed


def salted_seed(*salts: str) -> int:
    """Seed of the block hashes of requests with these salts, each of which may be empty; SEED when all are. It is as
    secret as they are."""
    if not any(salts):
        return SEED
    return int.from_bytes(hashlib.sha256(repr(salts).encode()).digest(), "little") & MAX_HASH_SEED
