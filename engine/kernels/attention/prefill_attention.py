"""Causal attention of prompt chunks over the paged cache, for CUDA without flash-attn. Queries of several sequences lie
one after the other, and each chunk sees its sequence from the beginning."""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention.head_dims import head_dims, in_head, load
from engine.kernels.attention.scores import LOG2_E, LOWEST, PLAIN, Scores, capped
from runtime.device.quick_launch import QuickLaunch

# Queries and keys per tile, warps, stages. float32 uses no tensor cores, and the registers hold fewer values.
HALF_TILES = (64, 64, 4, 3)
WIDE_HEAD_TILES = (64, 32, 4, 2)  # of heads of 256
FLOAT_TILES = (32, 32, 4, 1)
WIDE_HEAD_FLOAT_TILES = (32, 16, 8, 1)


def query_tile(dtype: torch.dtype) -> int:
    """Number of queries that a program takes."""
    return (FLOAT_TILES if dtype == torch.float32 else HALF_TILES)[0]


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Indices that all layers of a step share, int32 on the device. A tile is up to `query_tile` queries of one
    chunk."""

    tile_chunk: Tensor  # [tiles]
    tile_start: Tensor  # [tiles], first query of the tile within its chunk
    query_start: Tensor  # [chunks], row of a chunk's first query
    context: Tensor  # [chunks], tokens of the sequence before the chunk
    length: Tensor  # [chunks], queries
    table_start: Tensor  # [chunks], where a chunk's block table begins in `tables`
    tables: Tensor


def plan_tiles(lengths: np.ndarray, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """(chunk, first query) of each tile. Tiles that see most of their chunk come first, because they take longest."""
    count = -(-lengths // tile)
    chunk = np.repeat(np.arange(len(lengths)), count)
    start = (np.arange(len(chunk)) - (np.cumsum(count) - count)[chunk]) * tile
    return chunk[::-1].astype(np.int32), start[::-1].astype(np.int32)


def prefill_attention(
    queries: Tensor, layer_cache: Tensor, plan: PrefillPlan, out: Tensor | None = None, scores: Scores = PLAIN
) -> Tensor:
    """queries, with contiguous last two dimensions -> [tokens, heads, head_dim], in `out` if given.

    layer_cache: [blocks, kv_heads, 2, block_size, head_dim], of their dtype or of float8_e4m3fn, the chunks' own keys
    and values included.
    """
    tokens, heads, head_dim = queries.shape
    _, kv_heads, _, block_size, _ = layer_cache.shape
    if out is None:
        out = torch.empty(tokens, heads, head_dim, dtype=queries.dtype, device=queries.device)
    wide = queries.dtype == torch.float32
    narrow, broad = (FLOAT_TILES, WIDE_HEAD_FLOAT_TILES) if wide else (HALF_TILES, WIDE_HEAD_TILES)
    tile, key_tile, num_warps, num_stages = narrow if head_dim <= 128 else broad
    _prefill[(heads, len(plan.tile_chunk))](
        queries,
        layer_cache,
        out,
        plan.tile_chunk,
        plan.tile_start,
        plan.query_start,
        plan.context,
        plan.length,
        plan.table_start,
        plan.tables,
        plan.tables if scores.sinks is None else scores.sinks,
        queries.stride(0),
        scores.factor(head_dim),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        QUERY_TILE=tile,
        KEY_TILE=key_tile,
        PRECISION="ieee" if wide else "tf32",
        num_warps=num_warps,
        num_stages=num_stages,
        **scores.constants(),
    )
    return out


@QuickLaunch
@triton.jit
def _prefill(
    queries,
    cache,
    out,
    tile_chunk,
    tile_start,
    query_start,
    context_lengths,
    lengths,
    table_start,
    tables,
    sinks,
    query_stride,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program computes one tile of queries under one head."""
    head = tl.program_id(0)
    tile = tl.program_id(1)
    chunk = tl.load(tile_chunk + tile)
    begin = tl.load(tile_start + tile)
    context = tl.load(context_lengths + chunk)
    length = tl.load(lengths + chunk)
    table = tables + tl.load(table_start + chunk)
    kv_head = head // (HEADS // KV_HEADS)
    members = begin + tl.arange(0, QUERY_TILE)
    dims = head_dims(HEAD_DIM)
    rows = (tl.load(query_start + chunk) + members).to(tl.int64)
    is_query = in_head(dims[None, :], HEAD_DIM, mask=(members < length)[:, None])
    at = head * HEAD_DIM + dims[None, :]
    query = tl.load(queries + rows[:, None] * query_stride + at, mask=is_query, other=0.0)
    positions = context + members
    best = tl.full((QUERY_TILE,), LOWEST, tl.float32)
    total = tl.zeros((QUERY_TILE,), tl.float32)
    if SINKS:
        best = tl.zeros((QUERY_TILE,), tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2_E
        total += 1.0
    result = tl.zeros((QUERY_TILE, dims.numel), tl.float32)
    end = tl.minimum(context + begin + QUERY_TILE, context + length)
    seen_by_all = (context + begin + 1) // KEY_TILE * KEY_TILE  # from here on not all queries see a key
    start = 0
    if WINDOW > 0:
        positions = tl.minimum(positions, context + length - 1)  # rows of padding see a token, too
        start = tl.maximum(context + begin - WINDOW + 1, 0) // KEY_TILE * KEY_TILE
        in_windows = tl.cdiv(tl.maximum(context + begin + QUERY_TILE - WINDOW, 0), KEY_TILE) * KEY_TILE
        in_windows = tl.minimum(in_windows, seen_by_all)  # and before here
        best, total, result = _attend(
            query, cache, table, positions, best, total, result, start, in_windows, end, kv_head, dims, scale,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEY_TILE, True, WINDOW, SOFTCAP, PRECISION,
        )  # fmt: skip
        start = in_windows
    best, total, result = _attend(
        query, cache, table, positions, best, total, result, start, seen_by_all, end, kv_head, dims, scale,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEY_TILE, False, WINDOW, SOFTCAP, PRECISION,
    )  # fmt: skip
    best, total, result = _attend(
        query, cache, table, positions, best, total, result, seen_by_all, end, end, kv_head, dims, scale,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, KEY_TILE, True, WINDOW, SOFTCAP, PRECISION,
    )  # fmt: skip
    result = result / total[:, None]
    tl.store(out + rows[:, None] * (HEADS * HEAD_DIM) + at, result.to(out.dtype.element_ty), mask=is_query)


@triton.jit
def _attend(
    query,
    cache,
    table,
    positions,
    best,
    total,
    result,
    start,
    stop,
    end,
    kv_head,
    dims,
    scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attends to keys [start, stop) in tiles. MASKED: keys from `end` on, behind a query's position, or before its
    window, are hidden."""
    slots = tl.arange(0, KEY_TILE)
    for first in tl.range(start, stop, KEY_TILE):
        tokens = first + slots
        if KEY_TILE <= BLOCK_SIZE:
            block = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
            base = (block * KV_HEADS + kv_head) * (2 * BLOCK_SIZE * HEAD_DIM)
            offsets = base + (first % BLOCK_SIZE + slots) * HEAD_DIM
        else:
            # There may be no block behind the end: the last block is read again, and masked.
            blocks = tl.load(table + tl.minimum(tokens, end - 1) // BLOCK_SIZE).to(tl.int64)
            bases = (blocks * KV_HEADS + kv_head) * (2 * BLOCK_SIZE * HEAD_DIM)
            offsets = bases + (tokens % BLOCK_SIZE) * HEAD_DIM
        if MASKED:
            keys = load(cache + offsets[None, :] + dims[:, None], dims[:, None], HEAD_DIM, mask=(tokens < end)[None, :])
        else:
            keys = load(cache + offsets[None, :] + dims[:, None], dims[:, None], HEAD_DIM)
        scores = capped(tl.dot(query, keys.to(query.dtype), input_precision=PRECISION) * scale, SOFTCAP)
        if MASKED:
            visible = tokens[None, :] <= positions[:, None]
            if WINDOW > 0:
                visible &= tokens[None, :] > positions[:, None] - WINDOW
            scores = tl.where(visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weights, axis=1)
        at_values = cache + BLOCK_SIZE * HEAD_DIM + offsets[:, None] + dims[None, :]
        if MASKED:
            values = load(at_values, dims[None, :], HEAD_DIM, mask=(tokens < end)[:, None])
        else:
            values = load(at_values, dims[None, :], HEAD_DIM)
        result = result * shrink[:, None]
        result = tl.dot(weights.to(query.dtype), values.to(query.dtype), result, input_precision=PRECISION)
        best = new_best
    return best, total, result
