"""Block and sequence hashes of token lists: the names under which KV blocks are known all over the cluster.

The router hashes prompts to look them up in its radix tree; engines hash the blocks that they compute to publish them.
One implementation serves both, without torch. Definitions, bit-exact with NVIDIA Dynamo 1.6:

- block hash: xxh3_64 over the block's token ids as little-endian u32, seed 1337; full blocks only
- sequence hash: s_0 = h_0, s_i = xxh3_64(LE64(s_(i-1)) + LE64(h_i), seed 1337); names a block together with its prefix
- LoRA: the block hash's seed becomes (1337 + xxh3_64(adapter name, seed 0)) mod 2^64

Beyond Dynamo, a request with a cache salt has a seed of its own, too. Hence only requests with the same salt share
blocks.
"""

import hashlib
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from baton_proto.kv_events import DEFAULT_HASH_SEED, MAX_HASH_SEED

SEED: Final = DEFAULT_HASH_SEED
MASK_64: Final = 2**64 - 1
TOKEN: Final = np.dtype("<u4")
WORD: Final = np.dtype("<u8")

BATCHED_SIZES: Final = (8, 16, 24, 32)
"""Block sizes in tokens for which XXH3 is a short formula, computed for all blocks of a prompt at once."""


def prepare() -> None:
    """Loads all that a hash needs: 0.2 s, or some seconds the first time on a machine; again: nothing. From any thread.
    Because numba loads modules at the first call too, a hash is computed."""
    sequence_hashes(block_hashes(np.zeros(BATCHED_SIZES[0], dtype=TOKEN), BATCHED_SIZES[0]))


def block_hashes(tokens: NDArray[np.uint32], block_size: int, seed: int = SEED) -> NDArray[np.uint64]:
    """Hashes of the full blocks of `tokens` [num_tokens] -> [num_tokens // block_size]."""
    num_blocks = len(tokens) // block_size
    data = np.ascontiguousarray(tokens[: num_blocks * block_size], dtype=TOKEN)
    hashes = np.empty(num_blocks, dtype=np.uint64)
    if block_size in BATCHED_SIZES:
        from runtime.blocks.xxh3 import hash_rows  # not at the top: workers load it while they load their model

        hash_rows(data.view(WORD), block_size * TOKEN.itemsize // WORD.itemsize, np.uint64(seed), hashes)
        return hashes
    rows = data.reshape(num_blocks, block_size)
    for block in range(num_blocks):
        hashes[block] = xxhash.xxh3_64_intdigest(rows[block], seed)
    return hashes


def sequence_hashes(hashes: NDArray[np.uint64], parent: int | None = None) -> NDArray[np.uint64]:
    """Chains block hashes [n] -> [n]. `parent`: sequence hash of the block before the first; None: there is none."""
    from runtime.blocks.xxh3 import hash_chain

    chained = hashes.copy()
    if parent is not None:
        hash_chain(hashes, np.uint64(parent), chained)
    elif len(hashes):
        hash_chain(hashes[1:], hashes[0], chained[1:])
    return chained


def lora_seed(name: str) -> int:
    """Seed of the block hashes of requests that use the LoRA adapter `name`, because their KV differs."""
    return (SEED + xxhash.xxh3_64_intdigest(name.encode())) & MASK_64


def salted_seed(*salts: str) -> int:
    """Seed of the block hashes of requests with these salts, each of which may be empty; SEED when all are. It is as
    secret as they are."""
    if not any(salts):
        return SEED
    return int.from_bytes(hashlib.sha256(repr(salts).encode()).digest(), "little") & MAX_HASH_SEED
