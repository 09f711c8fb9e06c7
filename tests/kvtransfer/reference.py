"""The KV cache of an unsharded worker, and what of it each rank of a sharded one holds: worked out without the code."""

from typing import Any

import numpy as np
import numpy.typing as npt

from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import RankSlab

Words = npt.NDArray[np.uint32]  # [layers, blocks, kv_heads, 2, block_size, head_dim]


def reference(layout: SlabLayout, seed: int) -> Words:
    words: Words = np.random.default_rng(seed).integers(1, 2**32, layout.shape, dtype=np.uint32)
    return words


def heads_of(rank: int, size: int, num_kv_heads: int) -> list[int]:
    """Heads dealt out in order, as often as it takes for every rank to have one."""
    dealt = np.repeat(np.arange(num_kv_heads), max(1, size // num_kv_heads))
    held: list[int] = dealt.reshape(size, -1)[rank].tolist()
    return held


def rank_words(slab: RankSlab) -> Any:
    """A slab of float32 as bits, in its shape."""
    return np.frombuffer(slab.buffer, dtype=np.uint32).reshape(slab.layout.shape)
