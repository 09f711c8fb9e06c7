"""Some heads of a slab's blocks as rows of words, the form in which copy_blocks.py copies them."""

import torch
from torch import Tensor

from kvtransfer.slab.layout import SlabLayout

WORD_BYTES = 8


def head_words(memory: Tensor, layout: SlabLayout, heads: range) -> Tensor:
    """A slab's bytes, uint8 [layout.nbytes or more] -> int64 [layers, blocks, words of the heads in a block]."""
    words = memory[: layout.nbytes].view(torch.int64)
    blocks = words.view(layout.num_layers, layout.num_blocks, layout.block_bytes // WORD_BYTES)
    size = layout.head_bytes // WORD_BYTES
    return blocks[:, :, heads.start * size : heads.stop * size]
