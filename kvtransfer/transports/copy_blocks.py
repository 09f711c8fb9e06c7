"""Copies blocks from one slab to another with one kernel: the other may be a peer GPU's memory, mapped here.

A driver's copy engine wants one call, and several microseconds, for each run of bytes; a kernel takes a table of them.
"""

import triton
import triton.language as tl
from torch import Tensor

from runtime.device.quick_launch import QuickLaunch

# 2 KiB a thread, and enough programs to fill NVLink: fewer reach 290 to 350 of 368 GB/s (benchmarks/kv_push.py, H200).
_WORDS, _WARPS = 2048, 8
_PROGRAMS = 128


def copy_blocks(source: Tensor, destination: Tensor, table: Tensor, num_programs: int = _PROGRAMS) -> None:
    """source, destination: int64 [layers, blocks, words of a block], as many layers in both, words contiguous.

    table: int32 [2, count], from which block to which, in every layer. Enqueued on the current stream.
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
