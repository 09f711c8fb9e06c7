"""Block and sequence hashes of token lists: the names under which KV blocks are known all over the cluster.

The router hashes prompts to look them up in its radix tree; engines hash what they compute to publish it. One
implementation serves both, without torch. Definitions, bit-exact with NVIDIA Dynamo 1.6:

- block hash: xxh3_64 over the block's token ids as little-endian u32, seed 1337; full blocks only
- sequence hash: s_0 = h_0, s_i = xxh3_64(LE64(s_(i-1)) + LE64(h_i), seed 1337); names a block together with its prefix
- LoRA: the block hash's seed becomes (1337 + xxh3_64(adapter name, seed 0)) mod 2^64

Blocks of 16 tokens are 64 bytes, for which XXH3 is a closed formula (XXH3_len_17to128_64b in the xxHash specification,
github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md): it is computed here for all blocks of a prompt at once.
"""

from functools import lru_cache
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

SEED: Final = 1337
MASK_64: Final = 2**64 - 1
TOKEN_BYTES: Final = 4

# Measured: below this many blocks one xxhash call per block is quicker than the fixed cost of the vector formula.
VECTOR_MIN_BLOCKS: Final = 120
# Blocks per round of the vector formula, so that its intermediate arrays stay in the L1/L2 cache.
VECTOR_ROUND_BLOCKS: Final = 1024

_PRIME64_1: Final = 0x9E3779B185EBCA87
_AVALANCHE: Final = np.uint64(0x165667919E3779F9)
_LOW_32: Final = np.uint64(0xFFFFFFFF)
_SHIFT_32: Final = np.uint64(32)
_SHIFT_37: Final = np.uint64(37)

# First 64 bytes of XXH3's default secret, as four 16-byte lanes of two u64.
_SECRET: Final = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1c"
        "ded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c"
    ),
    dtype="<u8",
).reshape(4, 2)
# Which lane of the secret goes with which 16 bytes of a 64-byte input: the formula works from both ends to the middle.
_LANE_OF_INPUT: Final = (0, 2, 3, 1)


def block_hashes(tokens: NDArray[np.uint32], block_size: int, seed: int = SEED) -> NDArray[np.uint64]:
    """Hashes of the full blocks of `tokens` [num_tokens] -> [num_tokens // block_size]."""
    num_blocks = len(tokens) // block_size
    data = np.ascontiguousarray(tokens[: num_blocks * block_size], dtype="<u4")
    if block_size != 16 or num_blocks < VECTOR_MIN_BLOCKS:
        return _hash_one_by_one(data, block_size, seed)
    hashes = np.empty(num_blocks, dtype=np.uint64)
    lanes = data.view("<u8").reshape(num_blocks, 8)
    for start in range(0, num_blocks, VECTOR_ROUND_BLOCKS):
        end = min(start + VECTOR_ROUND_BLOCKS, num_blocks)
        _hash_64_bytes(lanes[start:end], seed, hashes[start:end])
    return hashes


def sequence_hashes(hashes: NDArray[np.uint64], parent: int | None = None) -> NDArray[np.uint64]:
    """Chains block hashes [n] -> [n]. `parent` is the sequence hash of the block before the first one; None: there is
    none."""
    digest = xxhash.xxh3_64_intdigest
    chained: list[int] = []
    for block in hashes.tolist():
        parent = block if parent is None else digest((block << 64 | parent).to_bytes(16, "little"), SEED)
        chained.append(parent)
    return np.array(chained, dtype=np.uint64)


def lora_seed(name: str) -> int:
    """Seed of the block hashes of requests that use the LoRA adapter `name`: their KV differs, so their blocks must
    too."""
    return (SEED + xxhash.xxh3_64_intdigest(name.encode(), 0)) & MASK_64


def _hash_one_by_one(data: NDArray[np.uint32], block_size: int, seed: int) -> NDArray[np.uint64]:
    digest = xxhash.xxh3_64_intdigest
    text = data.tobytes()
    step = block_size * TOKEN_BYTES
    return np.array([digest(text[i : i + step], seed) for i in range(0, len(text), step)], dtype=np.uint64)


def _hash_64_bytes(lanes: NDArray[np.uint64], seed: int, out: NDArray[np.uint64]) -> None:
    """xxh3_64 of rows of 64 bytes, given as u64 [n, 8], into `out` [n].

    Per 16 bytes: the 128-bit product of its two halves, each xored with a key, folded to 64 bits by xor. The sum of
    the four goes through the final avalanche. u64 arithmetic of numpy wraps, which is what the formula wants.
    """
    keyed = np.empty((8, len(lanes)), dtype=np.uint64)  # transposed: each operation below runs over contiguous rows
    np.bitwise_xor(lanes.T, _keys(seed), out=keyed)
    folded = _fold_product(keyed[0::2], keyed[1::2])
    total = folded[0] + folded[1]
    total += folded[2]
    total += folded[3]
    total += np.uint64(64 * _PRIME64_1 & MASK_64)
    total ^= total >> _SHIFT_37
    total *= _AVALANCHE
    np.right_shift(total, _SHIFT_32, out=out)
    out ^= total


@lru_cache(maxsize=64)
def _keys(seed: int) -> NDArray[np.uint64]:
    """[8, 1]: what each of the 8 u64 of an input is xored with."""
    pairs = [((int(low) + seed) & MASK_64, (int(high) - seed) & MASK_64) for low, high in _SECRET[list(_LANE_OF_INPUT)]]
    return np.array(pairs, dtype=np.uint64).reshape(8, 1)


def _fold_product(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Low half xor high half of the 128-bit products a * b, by schoolbook multiplication of 32-bit halves."""
    a_low, a_high = a & _LOW_32, a >> _SHIFT_32
    b_low, b_high = b & _LOW_32, b >> _SHIFT_32
    carry = a_low * b_low
    carry >>= _SHIFT_32
    middle = a_high * b_low
    middle += carry
    np.bitwise_and(middle, _LOW_32, out=carry)
    a_low *= b_high
    carry += a_low
    carry >>= _SHIFT_32
    middle >>= _SHIFT_32
    a_high *= b_high
    a_high += middle
    a_high += carry
    a_high ^= a * b
    return a_high
