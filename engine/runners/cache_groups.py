"""How the memory for KV is split between layers that see all and layers with a window."""

import dataclasses
from typing import Final

from engine.blocks.window_blocks import most_held
from kvtransfer.slab.layout import SlabLayout
from runtime.checkpoint.model_config import ModelConfig

MOST: Final = 2 / 3  # of the blocks that layers with a window would have if all layers had the same


def in_two_groups(
    layout: SlabLayout, model: ModelConfig, max_running: int, max_batch_tokens: int, max_model_len: int
) -> SlabLayout:
    """A slab of no more bytes than one in which all L layers have the same N blocks; that one where two groups would
    not hold more.

    The W layers with a window get n blocks: for what `max_running` sequences see at once, for the ends of as many
    cached prefixes, and for the prompts of a step, but at most MOST * N. The others get (N * L - n * W) / (L - W)
    blocks. That is 2.7 N for Gemma 3, with a window of 1024 in 5 of 6 layers, where MOST is the bound, and 1.9 N for
    gpt-oss, with a window of 128 in every second layer.

    Where all layers have a window, they have N blocks, and there are as many block ids as sequences of `max_model_len`
    need that see as much at once.
    """
    sliding = frozenset(layer for layer in range(layout.num_layers) if model.window(layer))
    held = most_held(max(model.windows, default=1), layout.block_size)
    if not sliding or max_model_len <= held * layout.block_size:
        return layout
    num_blocks, num_full = layout.num_blocks, layout.num_layers - len(sliding)
    if num_full:
        wanted = 2 * max_running * held + max_batch_tokens // layout.block_size + 1
        num_sliding = min(wanted, int(MOST * num_blocks))
        num_blocks = (num_blocks * layout.num_layers - num_sliding * len(sliding)) // num_full
    else:
        num_sliding, num_blocks = num_blocks, num_blocks // held * -(-max_model_len // layout.block_size)
    if num_sliding <= held or num_blocks <= layout.num_blocks:
        return layout
    return dataclasses.replace(layout, num_blocks=num_blocks, window_layers=sliding, num_window_blocks=num_sliding)
