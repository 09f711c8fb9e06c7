"""One kernel that copies blocks from one slab to another, which may be a peer GPU's memory, mapped here.

The driver's copy engine would take one call, of several microseconds, for each run of bytes; the kernel takes a table.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtransfer.slab.layout import SlabLayout
from runtime.device.quick_launch import QuickLaunch

# 64 bytes a thread and piece; fewer programs reach 290 to 350 of NVLink's 368 GB/s (benchmarks/kv_push.py, H200).
_WORDS, _WARPS = 2048, 8
_PROGRAMS = 128


WORD_BYTES = 8


def head_words(memory: Tensor, layout: SlabLayout, heads: range, layers: range) -> Tensor:
    """A slab's bytes, uint8 [layout.nbytes or more] -> int64 [layers, blocks, words of the heads in a block], of
    neighbouring layers with the same blocks."""
    ids = layout.layer_blocks(layers.start)
    begin, nbytes = layout.offset(layers.start, ids.start), len(layers) * len(ids) * layout.block_bytes
    words = memory[begin : begin + nbytes].view(torch.int64)
    size = layout.head_bytes // WORD_BYTES
    return words.view(len(layers), len(ids), -1)[:, :, heads.start * size : heads.stop * size]


def copy_blocks(source: Tensor, destination: Tensor, table: Tensor, num_programs: int = _PROGRAMS) -> None:
    """Enqueues the copy on the current stream.

    source, destination: int64 [layers, blocks, words of a block], equally many layers, words contiguous.
    table: int32 [2, count], from which block to which block, the same in every layer.
    """
    _copy_blocks[(num_programs,)](
        source,
        destination,
        table,
        source.shape[0],
        table.shape[1],
        source.shape[2],
        source.stride(0),
        source.stride(1),
        destination.stride(0),
        destination.stride(1),
        WORDS=_WORDS,
        num_warps=_WARPS,
    )


@QuickLaunch
@triton.jit(do_not_specialize=["layers", "count"])
def _copy_blocks(
    source,
    destination,
    table,
    layers,
    count,
    words,
    source_layer_stride,
    source_stride,
    destination_layer_stride,
    destination_stride,
    WORDS: tl.constexpr,
):
    pieces = tl.cdiv(words, WORDS)
    for piece in range(tl.program_id(0), layers * count * pieces, tl.num_programs(0)):
        at = (piece % pieces) * WORDS + tl.arange(0, WORDS)
        block = (piece // pieces) % count
        layer = (piece // (pieces * count)).to(tl.int64)
        begin = layer * source_layer_stride + tl.load(table + block).to(tl.int64) * source_stride
        end = layer * destination_layer_stride + tl.load(table + count + block).to(tl.int64) * destination_stride
        values = tl.load(source + begin + at, mask=at < words)
        tl.store(destination + end + at, values, mask=at < words)
