"""Copies blocks from one slab to another with one kernel: the other may be a peer GPU's memory, mapped here.

A driver's copy engine wants one call, and several microseconds, for each run of bytes; a kernel takes a table of them.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.quick_launch import QuickLaunch

# 2 KiB a thread, and enough programs to fill NVLink: fewer reach 290 to 350 of 368 GB/s (benchmarks/kv_push.py, H200).
_WORDS, _WARPS = 2048, 8
_PROGRAMS = 128


def copy_blocks(source: Tensor, destination: Tensor, table: Tensor, num_programs: int = _PROGRAMS) -> None:
    """source, destination: int64 [blocks, words of a block], one layer of a slab each, rows contiguous.

    table: int32 [2, count], from which block to which. Enqueued on the current stream.
    """
    _copy_blocks[(num_programs,)](
        source,
        destination,
        table,
        table.shape[1],
        source.shape[1],
        source.stride(0),
        destination.stride(0),
        WORDS=_WORDS,
        num_warps=_WARPS,
    )


@QuickLaunch
@triton.jit(do_not_specialize=["count"])
def _copy_blocks(
    source,
    destination,
    table,
    count,
    words,
    source_stride,
    destination_stride,
    WORDS: tl.constexpr,
):
    pieces = tl.cdiv(words, WORDS)
    for piece in range(tl.program_id(0), count * pieces, tl.num_programs(0)):
        block = piece // pieces
        at = (piece % pieces) * WORDS + tl.arange(0, WORDS)
        begin = tl.load(table + block).to(tl.int64) * source_stride
        end = tl.load(table + count + block).to(tl.int64) * destination_stride
        values = tl.load(source + begin + at, mask=at < words)
        tl.store(destination + end + at, values, mask=at < words)
