"""The sum of all ranks' parts, added to the residual stream, in one launch that can also compute the RMS norm. Each
rank has the other ranks' segments of memory mapped.

Parts of few rows, for which latency between GPUs costs more than bytes, are sent with flags in them: a rank writes its
part to all others, every 4 bytes together with the number of the sum in one word of 8 bytes, and adds words as they
arrive (NCCL's LL protocol). Larger parts move half as many bytes in two rounds: the ranks set flags that their parts
are ready, then each rank reads the parts where they lie.

Two sums take turns with the memory. Invariant: a rank that has passed the wait of one sum knows that all ranks have
ended the sum before, whose memory may be written again. Every rank adds in the order of the ranks, so all get the same
bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import dependent_launch, start_next, wait_for_previous
from engine.kernels.stream_flag import FOREVER

MAX_PROGRAMS = 128  # all run at once, because they wait for each other across devices
_FLAT = 1024  # columns of a row when no norm needs the real rows
_FLAG_BYTES = 4
_WORD_BYTES = 8  # of which half are data


def flag_bytes(ranks: int) -> int:
    """Bytes of flags at the start of a segment."""
    return MAX_PROGRAMS * ranks * _FLAG_BYTES


def flagged_room(ranks: int, part_bytes: int) -> int:
    """Bytes of a segment for one flagged sum of parts up to `part_bytes`: each rank's words."""
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
    *,
    part: Tensor | None = None,
    part_bytes: int = 0,
) -> Tensor | None:
    """hidden [rows, size], contiguous, += the sum of all ranks' parts, of the same shape and type. With `norm`, weights
    [size], the RMS norm of the result is returned.

    segments: int64 [ranks], addresses. offset: bytes from the start of a segment to the memory of this sum. epochs:
    int32 [MAX_PROGRAMS], zero at first, as the flags are. After `max_turns` turns the wait ends and the sum is
    undefined. part: None, and every rank's part lies at `offset` of its own segment; or this rank's part, of at most
    MAX_PROGRAMS rows, which is sent with flags in it to words at `offset`, with room for parts of `part_bytes` bytes.
    Invariant: every rank launches the same sums in the same order.
    """
    normed = None if norm is None else torch.empty_like(hidden)
    memory = (hidden if normed is None else normed, hidden if norm is None else norm, segments, epochs)
    options = {"RANK": rank, "RANKS": len(segments), "NORM": norm is not None, **dependent_launch(hidden)}
    if part is not None:
        words = offset // _WORD_BYTES, part_bytes * 2 // _WORD_BYTES
        _launch_flagged(hidden, part, (*memory, *words, eps, max_turns), options)
        return normed
    total = hidden.numel()
    size = hidden.shape[1] if norm is not None else _FLAT
    block = triton.next_power_of_2(size)
    rows = triton.next_power_of_2(triton.cdiv(triton.cdiv(total, size), MAX_PROGRAMS))
    _add_peer_sum[(triton.cdiv(total, size * rows),)](
        hidden,
        *memory,
        offset // hidden.element_size(),
        total,
        eps,
        max_turns,
        ROWS=rows,
        SIZE=size,
        BLOCK=block,
        num_warps=4 if rows * block <= 2048 else 8,
        **options,
    )
    return normed


def _launch_flagged(hidden: Tensor, part: Tensor, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    rows, size = hidden.shape
    values_per_word = 4 // hidden.element_size()
    words = size // values_per_word
    block = triton.next_power_of_2(words)
    _add_flagged_sum[(rows,)](
        hidden,
        part,
        *arguments,
        WORDS=words,
        BLOCK=block,
        HALVES=values_per_word,
        num_warps=min(8, max(1, block // 128)),
        **options,
    )


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
    """A program adds ROWS rows."""
    start_next(OVERLAP)
    columns = tl.arange(0, BLOCK)
    if NORM:
        weights = tl.load(norm + columns, mask=columns < SIZE, other=0.0)
    wait_for_previous(OVERLAP)
    program = tl.program_id(0)
    epoch = tl.load(epochs + program) + 1
    for peer in tl.static_range(RANKS):
        flags = tl.load(segments + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + program * RANKS + RANK, epoch, sem="release", scope="sys")
    own = tl.load(segments + RANK).to(tl.pointer_type(tl.int32))
    turns = 0
    for peer in tl.static_range(RANKS):
        seen = tl.atomic_add(own + program * RANKS + peer, 0, sem="acquire", scope="sys")
        while (seen - epoch < 0) & (turns < max_turns):  # a peer may be one sum ahead; the difference may wrap
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
    """A program adds one row, in words of 4 bytes: one float32 each, or HALVES = 2 values of 16 bits."""
    start_next(OVERLAP)
    dtype: tl.constexpr = hidden.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    mask = columns < WORDS
    if NORM:
        weights = tl.load(norm.to(tl.pointer_type(tl.int32)) + columns, mask=mask, other=0)
    wait_for_previous(OVERLAP)
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
    """The values of words as float32: lower halves (index 0), upper halves (index 1), or whole words."""
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
