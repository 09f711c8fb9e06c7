"""The sum of what all ranks computed, added to the residual stream, in one launch that may normalise it as well: each
rank has the others' segments of memory mapped.

`add_flagged_sum` is for the fewest rows, where a way between GPUs counts for more than bytes: a rank writes its part to
all others, each 4 bytes with the number of the sum behind them in one word of 8, and adds as the words come in (what
NCCL calls its LL protocol). `add_peer_sum` moves half as many bytes, and more often: the ranks tell each other by flags
that their parts are ready, then each reads them where they lie.

The memory in between is used by turns, two of them. Whoever has passed the wait of one sum knows that all ranks have
ended the sum before: the memory of that one may be written again. Every rank adds in the order of the ranks, so that
all get the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.dependent_launch import dependent_launch
from engine.kernels.stream_flag import FOREVER

MAX_PROGRAMS = 128  # no more than run at once: they wait for each other across devices
_FLAT = 1024  # columns of a row where rows do not matter
_FLAG_BYTES = 4
_WORD_BYTES = 8  # of which half are data


def flag_bytes(ranks: int) -> int:
    """Of a segment, in front of its buffers."""
    return MAX_PROGRAMS * ranks * _FLAG_BYTES


def flagged_room(ranks: int, part_bytes: int) -> int:
    """Of a segment, for flagged sums of parts up to that size: room for each rank's words."""
    return ranks * part_bytes * 2


def add_peer_sum(
    hidden: Tensor,
    segments: Tensor,
    offset: int,
    epochs: Tensor,
    rank: int,
    norm: Tensor | None = None,
    eps: float = 0.0,
    max_turns: int = FOREVER,
) -> Tensor | None:
    """hidden += the sum over all ranks of what lies, as large and of the same type, `offset` bytes behind the beginning
    of their segments. With `norm`, weights [size], the RMS norm of the result comes back.

    hidden: [rows, size], contiguous. segments: int64 [ranks], addresses. epochs: int32 [MAX_PROGRAMS], zero at first,
    as the flags are. Every rank launches the same sums in the same order. After `max_turns` the wait is given up and
    the sum is anything.
    """
    total = hidden.numel()
    size = _FLAT if norm is None else hidden.shape[1]
    block = triton.next_power_of_2(size)
    rows = triton.next_power_of_2(triton.cdiv(triton.cdiv(total, size), MAX_PROGRAMS))
    normed = None if norm is None else torch.empty_like(hidden)
    overlap = dependent_launch(hidden)
    _add_peer_sum[(triton.cdiv(total, size * rows),)](
        hidden,
        hidden if normed is None else normed,
        hidden if norm is None else norm,
        segments,
        epochs,
        offset // hidden.element_size(),
        total,
        eps,
        max_turns,
        RANK=rank,
        RANKS=len(segments),
        ROWS=rows,
        SIZE=size,
        BLOCK=block,
        NORM=norm is not None,
        OVERLAP=overlap,
        num_warps=4 if rows * block <= 2048 else 8,
        launch_pdl=overlap,
    )
    return normed


def add_flagged_sum(
    hidden: Tensor,
    part: Tensor,
    segments: Tensor,
    offset: int,
    part_bytes: int,
    epochs: Tensor,
    rank: int,
    norm: Tensor | None = None,
    eps: float = 0.0,
    max_turns: int = FOREVER,
) -> Tensor | None:
    """As `add_peer_sum`, of at most MAX_PROGRAMS rows. `part`: this rank's. The words lie `offset` bytes behind the
    beginning of the segments, with room for parts of `part_bytes`."""
    rows, size = hidden.shape
    halves = 4 // hidden.element_size()
    words = size // halves
    block = triton.next_power_of_2(words)
    normed = None if norm is None else torch.empty_like(hidden)
    overlap = dependent_launch(hidden)
    _add_flagged_sum[(rows,)](
        hidden,
        part,
        hidden if normed is None else normed,
        hidden if norm is None else norm,
        segments,
        epochs,
        offset // _WORD_BYTES,
        part_bytes * 2 // _WORD_BYTES,
        eps,
        max_turns,
        RANK=rank,
        RANKS=len(segments),
        WORDS=words,
        BLOCK=block,
        HALVES=halves,
        NORM=norm is not None,
        OVERLAP=overlap,
        num_warps=min(8, max(1, block // 128)),
        launch_pdl=overlap,
    )
    return normed


@triton.jit(do_not_specialize=["max_turns"])
def _add_peer_sum(
    hidden,
    normed,
    norm,
    segments,
    epochs,
    offset,
    total,
    eps,
    max_turns,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program is ROWS rows."""
    if OVERLAP:
        gdc_launch_dependents()
    columns = tl.arange(0, BLOCK)
    if NORM:
        weights = tl.load(norm + columns, mask=columns < SIZE, other=0.0)
    if OVERLAP:
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
    at = (program * ROWS + tl.arange(0, ROWS))[:, None] * SIZE + columns[None, :]
    mask = (at < total) & (columns < SIZE)[None, :]
    values = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for peer in tl.static_range(RANKS):
        segment = tl.multiple_of(tl.load(segments + peer).to(tl.pointer_type(hidden.dtype.element_ty)), 16)
        values += tl.load(segment + offset + at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    values += tl.load(hidden + at, mask=mask, other=0.0).to(tl.float32)
    grown = values.to(hidden.dtype.element_ty)
    tl.store(hidden + at, grown, mask=mask)
    if NORM:
        values = grown.to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, axis=1) / SIZE + eps)
        result = values * scale[:, None] * weights.to(tl.float32)[None, :]
        tl.store(normed + at, result.to(normed.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["max_turns"])
def _add_flagged_sum(
    hidden,
    part,
    normed,
    norm,
    segments,
    epochs,
    offset,
    part_words,
    eps,
    max_turns,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALVES: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program is a row, in words of 4 bytes: one value each, or the two HALVES."""
    if OVERLAP:
        gdc_launch_dependents()
    dtype: tl.constexpr = hidden.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    mask = columns < WORDS
    if NORM:
        weights = tl.load(norm.to(tl.pointer_type(tl.int32)) + columns, mask=mask, other=0)
    if OVERLAP:
        gdc_wait()
    row = tl.program_id(0)
    at = row * WORDS + columns
    own = tl.load(part.to(tl.pointer_type(tl.int32)) + at, mask=mask, other=0)
    epoch = tl.load(epochs + row) + 1
    flagged = (epoch.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            segment = tl.multiple_of(tl.load(segments + peer).to(tl.pointer_type(tl.int64)), 16)
            tl.store(segment + offset + RANK * part_words + at, flagged, mask=mask)
    tl.store(epochs + row, epoch)
    mine = tl.multiple_of(tl.load(segments + RANK).to(tl.pointer_type(tl.int64)), 16)
    low = tl.zeros((BLOCK,), dtype=tl.float32)
    high = tl.zeros((BLOCK,), dtype=tl.float32)
    turns = 0
    for peer in tl.static_range(RANKS):
        words = own
        if peer != RANK:
            places = mine + offset + peer * part_words + at
            seen = tl.load(places, mask=mask, other=flagged, volatile=True)
            while (tl.max(((seen >> 32).to(tl.int32) != epoch).to(tl.int32), axis=0) != 0) & (turns < max_turns):
                seen = tl.load(places, mask=mask, other=flagged, volatile=True)
                turns += 1
            words = seen.to(tl.int32)
        low += _half(words, 0, HALVES, dtype)
        if HALVES == 2:
            high += _half(words, 1, HALVES, dtype)
    stream = hidden.to(tl.pointer_type(tl.int32)) + at
    words = tl.load(stream, mask=mask, other=0)
    low = (low + _half(words, 0, HALVES, dtype)).to(dtype)
    high = (high + _half(words, HALVES - 1, HALVES, dtype)).to(dtype)
    tl.store(stream, _words(low, high, HALVES), mask=mask)
    if NORM:
        low, high = low.to(tl.float32), high.to(tl.float32)
        squares = low * low
        if HALVES == 2:
            squares += high * high
        scale = tl.rsqrt(tl.sum(squares, axis=0) / (WORDS * HALVES) + eps)
        low = (low * scale * _half(weights, 0, HALVES, dtype)).to(dtype)
        high = (high * scale * _half(weights, HALVES - 1, HALVES, dtype)).to(dtype)
        tl.store(normed.to(tl.pointer_type(tl.int32)) + at, _words(low, high, HALVES), mask=mask)


@triton.jit
def _half(words, index: tl.constexpr, HALVES: tl.constexpr, dtype: tl.constexpr):
    """The values of words, float32: the lower halves (index 0) or the upper ones, or the whole."""
    if HALVES == 2:
        values = (words >> (16 * index)).to(tl.int16).to(dtype, bitcast=True)
    else:
        values = words.to(dtype, bitcast=True)
    return values.to(tl.float32)


@triton.jit
def _words(low, high, HALVES: tl.constexpr):
    if HALVES == 2:
        lower = low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = lower | (high.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        words = low.to(tl.int32, bitcast=True)
    return words
