"""Copies blocks from one slab to another with one kernel: the other may be a peer GPU's memory, mapped here.

A driver's copy engine wants one call, and several microseconds, for each run of bytes; a kernel takes a table of them.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# 2 KiB a thread, and enough programs to fill NVLink: fewer reach 290 to 350 of 368 GB/s (benchmarks/kv_push.py, H200).
_WORDS, _WARPS = 2048, 8
_PROGRAMS = 128


def copy_blocks(source: Tensor, destination: Tensor, table: Tensor, num_programs: int = _PROGRAMS) -> Any:
    """source, destination: int64 [blocks, words of a block], one layer of a slab each, rows contiguous.

    table: int32 [2, count], from which block to which. Enqueued on the current stream. Returns the compiled kernel.
    """
    return _copy_blocks[(num_programs,)](
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


class BlockCopy:
    """The kernel between two slabs, compiled once: finding it anew by its arguments takes the host 25 us a call."""

    def __init__(self, source: Tensor, destination: Tensor) -> None:
        """int64 [layers, blocks, words of a block], on a GPU or mapped there. Loads the kernel."""
        self._source, self._destination = source, destination
        nothing = torch.empty(2, 0, dtype=torch.int32, device=source.device)
        self._launch = copy_blocks(source[0], destination[0], nothing)[(_PROGRAMS, 1, 1)]

    def __call__(self, layer: int, table: Tensor) -> None:
        """On the current stream; see `copy_blocks`."""
        source, destination = self._source, self._destination
        self._launch(
            source.data_ptr() + layer * source.stride(0) * source.itemsize,
            destination.data_ptr() + layer * destination.stride(0) * destination.itemsize,
            table.data_ptr(),
            table.shape[1],
            source.shape[2],
            source.stride(1),
            destination.stride(1),
            _WORDS,
        )


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
