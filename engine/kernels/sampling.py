"""From logits to tokens, in a CUDA graph or after it: argmax of logit / temperature + Gumbel noise, or of the logit
alone, among all tokens or those of a mask.

The noise is that of engine/kernels/philox.py, so the host's sampler draws the same tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from engine.kernels.dependent_launch import dependent_launch, take_turn
from runtime.device.quick_launch import QuickLaunch

_CHUNK = 4096  # tokens of the vocabulary per program


@dataclass(frozen=True, slots=True)
class VocabularySplit:
    """The part of the vocabulary whose logits this rank computes."""

    first: int  # token of the logits' first column, a multiple of 4
    share: int  # tokens of each rank; the last rank may have fewer
    vocab: int  # tokens of all ranks
    gather: Callable[[Tensor], Tensor]  # [n] -> [ranks, n], from all ranks


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """The only rows that are sampled, and the tokens that they may get."""

    rows: Tensor  # int32 [n]
    words: Tensor  # int32 [n, words]: a bit per token of the whole vocabulary, the lowest first


def sample(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    partial: Tensor,
    out: Tensor,
    split: VocabularySplit | None = None,
    masked: MaskedRows | None = None,
) -> None:
    """Writes one token id per row of `logits` [rows, vocab] to int32 `out` [rows or more].

    temperatures: float32 [rows], 0 is greedy. seeds: int32 [rows, 2], low and high word. positions: int32 [rows], the
    output position of the token. partial: scratch from `partial_buffer`. With `split` each rank compares the best
    tokens of all ranks' chunks, so all ranks write the same tokens. With `masked` the other rows of `out` stay as they
    are.
    """
    rows, here = logits.shape
    chosen, masks, words = positions, positions, 0  # never read
    if masked is not None:
        chosen, masks, (rows, words) = masked.rows, masked.words, masked.words.shape
    chunks = triton.cdiv(here if split is None else split.share, _CHUNK)
    overlap = dependent_launch(logits)
    assert partial.numel() >= 2 * rows * chunks
    best = partial[: 2 * rows * chunks]
    _best_of_chunk[(rows, chunks)](
        logits,
        temperatures,
        seeds,
        positions,
        best[: rows * chunks].view(torch.float32),
        best[rows * chunks :],
        chosen,
        masks,
        0 if split is None else split.first,
        VOCAB=here,
        CHUNK=_CHUNK,
        CHUNKS=chunks,
        WORDS=words,
        FAST=logits.is_cuda,
        num_warps=8,
        **overlap,
    )
    # [ranks, values and indices of the chunks' best tokens]
    parts = best[None] if split is None else split.gather(best)
    _best_of_row[(rows,)](
        parts.view(torch.float32),
        parts,
        out,
        chosen,
        rows * chunks,
        VOCAB=here if split is None else split.vocab,
        CHUNKS=chunks,
        MASKED=masked is not None,
        RANKS=len(parts),
        PADDED=triton.next_power_of_2(len(parts) * chunks),
        num_warps=1,
        **overlap,
    )


def partial_buffer(max_rows: int, vocab: int, device: torch.device) -> Tensor:
    """Scratch of `sample` for `max_rows` rows of logits with `vocab` columns on this rank."""
    return torch.empty(2 * max_rows * triton.cdiv(vocab, _CHUNK), dtype=torch.int32, device=device)


@QuickLaunch
@triton.jit
def _best_of_chunk(
    logits,
    temperatures,
    seeds,
    positions,
    values,
    indices,
    chosen,
    masks,
    first,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    WORDS: tl.constexpr,
    FAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    at = row
    if WORDS:
        at = tl.load(chosen + row).to(tl.int64)
    chunk = tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    scores = tl.load(logits + at * VOCAB + columns, mask=columns < VOCAB, other=float("-inf")).to(tl.float32)
    if WORDS:
        allowed = tl.load(masks + row * WORDS + (first + columns) // 32, mask=columns < VOCAB, other=0)
        scores = tl.where((allowed >> ((first + columns) % 32)) & 1 != 0, scores, float("-inf"))
    temperature = tl.load(temperatures + at)
    if temperature > 0:
        low = tl.load(seeds + at * 2).to(tl.uint32, bitcast=True).to(tl.uint64)
        high = tl.load(seeds + at * 2 + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
        groups = (first // 4 + chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)).to(tl.uint32)
        zero = groups * 0
        position = tl.load(positions + at).to(tl.uint32, bitcast=True) + zero
        w0, w1, w2, w3 = tl.philox(low | (high << 32), groups, position, zero, zero)
        words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (CHUNK,))  # word i of counter g at 4 * g + i
        uniform = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.999999940395355224609375)
        # -log1p(-u) as a series where 1 - u rounds: small u decide which token wins.
        series = uniform * (1.0 + uniform * (0.5 + uniform * (1.0 / 3.0 + uniform * 0.25)))
        exponential = tl.where(uniform < 0.03, series, -_log(1.0 - uniform, FAST))
        scores = scores * (1.0 / temperature) - _log(exponential, FAST)
    score, best = tl.max(scores, axis=0, return_indices=True)
    tl.store(values + row * CHUNKS + chunk, score)
    tl.store(indices + row * CHUNKS + chunk, first + chunk * CHUNK + best)


@triton.jit
def _log(x, FAST: tl.constexpr):
    """FAST has a relative error of 2**-22, enough for noise, and takes a fifth of the time."""
    if FAST:
        result = libdevice.fast_logf(x)
    else:
        result = tl.log(x)
    return result


@QuickLaunch
@triton.jit
def _best_of_row(
    values,
    indices,
    out,
    chosen,
    size,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    MASKED: tl.constexpr,
    RANKS: tl.constexpr,
    PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Each rank contributes `size` values, [rows, CHUNKS], followed by as many indices."""
    take_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, PADDED)
    at = chunks // CHUNKS * (2 * size) + row * CHUNKS + chunks % CHUNKS
    scores = tl.load(values + at, mask=chunks < RANKS * CHUNKS, other=float("-inf"))
    best = tl.minimum(tl.argmax(scores, axis=0), RANKS * CHUNKS - 1)
    token = tl.load(indices + size + best // CHUNKS * (2 * size) + row * CHUNKS + best % CHUNKS)
    to = row
    if MASKED:
        to = tl.load(chosen + row).to(tl.int64)
    tl.store(out + to, tl.minimum(token, VOCAB - 1))  # in range even for rows of NaN
