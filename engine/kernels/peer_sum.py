"""The sum of what all ranks computed, added to the residual stream, in one launch: each rank reads the others' memory.

Each rank owns a segment that the others have mapped: flags first, then two buffers by turns. A program tells its
counterparts on the other ranks that this rank's part lies in the buffer, waits for theirs, and adds all parts of its
columns in the order of the ranks, so that every rank gets the same bits. Whoever has passed the wait of one sum knows
that all ranks have ended the sum before: the buffer of that one may be written again.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.dependent_launch import dependent_launch

MAX_PROGRAMS = 128  # no more than run at once: they wait for each other across devices
_MIN_TILE = 1024
_FLAG_BYTES = 4
FOREVER = 2**31 - 1  # turns of a wait, each about a microsecond


def flag_bytes(ranks: int) -> int:
    """Of a segment, in front of its buffers."""
    return MAX_PROGRAMS * ranks * _FLAG_BYTES


def add_peer_sum(
    hidden: Tensor, segments: Tensor, offset: int, epochs: Tensor, rank: int, max_turns: int = FOREVER
) -> None:
    """hidden += the sum over all ranks of what lies, as large and of the same type, `offset` bytes behind the beginning
    of their segments.

    segments: int64 [ranks], addresses. epochs: int32 [MAX_PROGRAMS], zero at first, as the flags are. Every rank
    launches the same sums in the same order. After `max_turns` the wait is given up and the sum is anything.
    """
    size = hidden.numel()
    tile = max(_MIN_TILE, triton.next_power_of_2(triton.cdiv(size, MAX_PROGRAMS)))
    overlap = dependent_launch(hidden)
    _add_peer_sum[(triton.cdiv(size, tile),)](
        hidden,
        segments,
        epochs,
        offset // hidden.element_size(),
        size,
        max_turns,
        RANK=rank,
        RANKS=len(segments),
        TILE=tile,
        OVERLAP=overlap,
        num_warps=4 if tile <= 2048 else 8,
        launch_pdl=overlap,
    )


@triton.jit(do_not_specialize=["max_turns"])
def _add_peer_sum(
    hidden,
    segments,
    epochs,
    offset,
    size,
    max_turns,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    epoch = tl.load(epochs + program) + 1
    for peer in tl.static_range(RANKS):
        flags = tl.load(segments + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + program * RANKS + RANK, epoch, sem="release", scope="sys")
    own = tl.load(segments + RANK).to(tl.pointer_type(tl.int32))
    turns = 0
    for peer in tl.static_range(RANKS):
        seen = tl.atomic_add(own + program * RANKS + peer, 0, sem="acquire", scope="sys")
        while (seen - epoch < 0) & (turns < max_turns):  # a peer may be one ahead; the difference may wrap
            seen = tl.atomic_add(own + program * RANKS + peer, 0, sem="acquire", scope="sys")
            turns += 1
    tl.store(epochs + program, epoch)
    at = program * TILE + tl.arange(0, TILE)
    mask = at < size
    total = tl.zeros((TILE,), dtype=tl.float32)
    for peer in tl.static_range(RANKS):
        segment = tl.multiple_of(tl.load(segments + peer).to(tl.pointer_type(hidden.dtype.element_ty)), 16)
        total += tl.load(segment + offset + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    total += tl.load(hidden + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(hidden + at, total.to(hidden.dtype.element_ty), mask=mask)
