"""The hashes of block_hash.py for whole prompts: XXH3, 64 bits, of many short inputs in one compiled loop.

Formula: XXH3_len_17to128_64b of the xxHash specification (github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md).
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from runtime.blocks import block_hash
from runtime.compiled import HASHES, U64, compiled, inlined

BATCHED_SIZES: Final = (8, 16, 24, 32)
"""Block sizes in tokens for which XXH3 is a short formula, computed for all blocks of a prompt at once."""

_SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
        "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    ),
    dtype="<u8",
)
_PRIME = U64(0x9E3779B185EBCA87)
_AVALANCHE = U64(0x165667919E3779F9)
_LOW_32 = U64(0xFFFFFFFF)
_SHIFT_32, _SHIFT_37 = U64(32), U64(37)
_WORD = np.dtype("<u8")


def block_hashes(tokens: NDArray[np.uint32], block_size: int, seed: int = block_hash.SEED) -> NDArray[np.uint64]:
    """Hashes of the full blocks of `tokens` [num_tokens] -> [num_tokens // block_size]."""
    if block_size not in BATCHED_SIZES:
        return block_hash.block_hashes(tokens, block_size, seed)
    num_blocks = len(tokens) // block_size
    data = np.ascontiguousarray(tokens[: num_blocks * block_size], dtype=block_hash.TOKEN)
    hashes = np.empty(num_blocks, dtype=np.uint64)
    _hash_rows(data.view(_WORD), block_size * block_hash.TOKEN.itemsize // _WORD.itemsize, np.uint64(seed), hashes)
    return hashes


@inlined
def _folded_product(a: np.uint64, b: np.uint64) -> np.uint64:
    """Low half xor high half of the 128-bit product, by schoolbook multiplication of 32-bit halves."""
    a_low, a_high, b_low, b_high = a & _LOW_32, a >> _SHIFT_32, b & _LOW_32, b >> _SHIFT_32
    middle = a_high * b_low + (a_low * b_low >> _SHIFT_32)
    carry = a_low * b_high + (middle & _LOW_32)
    return a * b ^ a_high * b_high + (middle >> _SHIFT_32) + (carry >> _SHIFT_32)


@inlined
def _avalanche(total: np.uint64) -> np.uint64:
    total = (total ^ total >> _SHIFT_37) * _AVALANCHE
    return total ^ total >> _SHIFT_32


@compiled(f"void({HASHES}, int64, uint64, uint64[::1])")
def _hash_rows(data: NDArray[np.uint64], words: int, seed: np.uint64, out: NDArray[np.uint64]) -> None:
    """Hashes of rows of `words` u64 each (4, 8, 12 or 16), given flat in `data`, into `out` [rows].

    Works from both ends of a row to its middle. Per 16 bytes it adds the folded product of the two halves, each xored
    with the key of its place.
    """
    for row in range(len(out)):
        front, back = row * words, (row + 1) * words - 2
        total = U64(8 * words) * _PRIME
        for step in range(words // 4):
            key, at = 4 * step, 2 * step
            total += _folded_product(
                data[front + at] ^ _SECRET[key] + seed, data[front + at + 1] ^ _SECRET[key + 1] - seed
            )
            total += _folded_product(
                data[back - at] ^ _SECRET[key + 2] + seed, data[back - at + 1] ^ _SECRET[key + 3] - seed
            )
        out[row] = _avalanche(total)
