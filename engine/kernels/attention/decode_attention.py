"""Attention of one query per sequence over the paged cache, split along the context, so that few long sequences fill
the GPU as well as many short ones (flash-decoding, with the even shares of stream-K). The same launch can also
normalise, rotate and store the new token (rotate_store.py), which is faster for few sequences.

The host cuts the contexts into pieces and assigns them to a fixed number of programs (decode_pieces.py),
so a CUDA graph can capture the launch. The last program to finish a sequence's head merges its pieces.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention import decode_pieces
from engine.kernels.attention.head_dims import head_dims, in_head, load
from engine.kernels.attention.rotate_store import Rotation, store
from engine.kernels.attention.scores import LOG2_E, LOWEST, PLAIN, Scores, capped
from engine.kernels.dependent_launch import dependent_launch, start_next, wait_for_previous
from runtime.device.quick_launch import QuickLaunch

# Fastest on an H200 (benchmarks/kernel_speed.py).
NUM_WARPS = 2
NUM_STAGES = 3
WIDE_HEAD = (4, 2)  # warps and stages of heads of 256
WIDE_HEAD_FLOAT = (8, 1)
_MIN_ROWS = 16  # fewest rows of a tl.dot, to which the query heads of a KV head are padded
_PARTS_AT_ONCE = 64  # heads times pieces that a merge holds in registers, of up to 128 dimensions


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Unfinished results, shared by all layers, which run one after the other. Invariant: `arrived` is zero between
    launches."""

    mixed: Tensor  # float32 [pieces, heads, head_dim]
    log_sums: Tensor  # float32 [pieces, heads], base 2
    arrived: Tensor  # int32 [rows * kv_heads]

    @classmethod
    def allocate(
        cls, max_rows: int, at_once: int, heads: int, kv_heads: int, head_dim: int, device: torch.device
    ) -> "DecodeScratch":
        pieces = max_rows + at_once
        return cls(
            torch.empty(pieces, heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(pieces, heads, dtype=torch.float32, device=device),
            torch.zeros(max_rows * kv_heads, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Indices that all layers of a step share, int32 on the device. See decode_pieces.Pieces."""

    program_first: Tensor  # [programs + 1]
    piece_row: Tensor  # [pieces]
    piece_start: Tensor  # [pieces]
    piece_end: Tensor  # [pieces]
    first_piece: Tensor  # [rows]
    num_pieces: Tensor  # [rows]
    table_start: Tensor  # [rows], where a row's block table begins in `tables`
    tables: Tensor  # block ids of all rows, one after the other


def decode_attention(
    queries: Tensor,
    layer_cache: Tensor,
    plan: DecodePlan,
    scratch: DecodeScratch,
    rotation: Rotation | None = None,
    out: Tensor | None = None,
    scores: Scores = PLAIN,
) -> Tensor:
    """queries, with contiguous last two dimensions -> [rows, heads, head_dim], in `out` if given.

    layer_cache: [blocks, kv_heads, 2, block_size, head_dim], of their dtype or of float8_e4m3fn. Rows without a piece
    are undefined. With `rotation`, `queries` holds keys and values too, [rows, heads + 2 * kv_heads, head_dim], which
    are stored. Invariant: `plan` is that of the scores' window.
    """
    rows, heads, head_dim = queries.shape
    _, kv_heads, _, block_size, _ = layer_cache.shape
    unused = plan.tables
    if rotation is None:
        rotation, rotary = Rotation(unused, unused, unused, None, None, 0.0), 0
    else:
        heads, rotary = heads - 2 * kv_heads, rotation.table.shape[-1]
    if out is None:
        out = torch.empty(rows, heads, head_dim, dtype=queries.dtype, device=queries.device)
    _decode[(kv_heads, len(plan.program_first) - 1)](
        queries,
        layer_cache,
        out,
        scratch.mixed,
        scratch.log_sums,
        scratch.arrived,
        plan.program_first,
        plan.piece_row,
        plan.piece_start,
        plan.piece_end,
        plan.first_piece,
        plan.num_pieces,
        plan.table_start,
        plan.tables,
        rotation.slots,
        rotation.positions,
        rotation.table,
        unused if rotation.query_norm is None else rotation.query_norm,
        unused if rotation.key_norm is None else rotation.key_norm,
        unused if rotation.query_scales is None else rotation.query_scales,
        unused if scores.sinks is None else scores.sinks,
        rotation.eps,
        queries.stride(0),
        scores.factor(head_dim),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TILE=decode_pieces.TILE,
        ROTARY=rotary,
        NORMS=rotation.query_norm is not None,
        QUERY_SCALES=rotation.query_scales is not None,
        **scores.constants(),
        **_options(queries, heads // kv_heads),
    )
    return out


def _options(queries: Tensor, group: int) -> dict[str, Any]:
    """Constants of the kernel that follow from the queries. group: query heads of a KV head."""
    padded, wide = triton.next_power_of_2(group), queries.dtype == torch.float32
    head_dim = queries.shape[-1]
    narrow, broad = ((NUM_WARPS, 1), WIDE_HEAD_FLOAT) if wide else ((NUM_WARPS, NUM_STAGES), WIDE_HEAD)
    num_warps, num_stages = narrow if head_dim <= 128 else broad
    return {
        "GROUP": group,
        "PADDED_GROUP": padded,
        "ROWS": max(_MIN_ROWS, padded),
        "PIECES_AT_ONCE": max(1, _PARTS_AT_ONCE // padded // max(1, triton.next_power_of_2(head_dim) // 128)),
        "PRECISION": "ieee" if wide else "tf32",
        "num_warps": num_warps,
        "num_stages": num_stages,
        **dependent_launch(queries),
    }


@QuickLaunch
@triton.jit
def _decode(
    queries,
    cache,
    out,
    mixed,
    log_sums,
    arrived,
    program_first,
    piece_row,
    piece_start,
    piece_end,
    first_piece,
    num_pieces,
    table_start,
    tables,
    slots,
    positions,
    angles,
    query_norm,
    key_norm,
    query_scales,
    sinks,
    eps,
    query_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PIECES_AT_ONCE: tl.constexpr,
    ROTARY: tl.constexpr,
    NORMS: tl.constexpr,
    QUERY_SCALES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program takes one share of the contexts under one KV head, for all of its query heads."""
    start_next(OVERLAP)
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    begin = tl.load(program_first + program)
    stop = tl.load(program_first + program + 1)
    members = tl.arange(0, ROWS)
    dims = head_dims(HEAD_DIM)
    places = tl.arange(0, TILE)
    is_member = in_head(dims[None, :], HEAD_DIM, mask=(members < GROUP)[:, None])
    heads = kv_head * GROUP + members
    at = heads[:, None] * HEAD_DIM + dims[None, :]
    if OVERLAP and TILE <= BLOCK_SIZE and begin < stop:
        first = tl.load(piece_start + begin)
        block = tl.load(tables + tl.load(table_start + tl.load(piece_row + begin)) + first // BLOCK_SIZE)
        tile = cache + (block.to(tl.int64) * KV_HEADS + kv_head) * (2 * BLOCK_SIZE * HEAD_DIM)
        tile += first % BLOCK_SIZE * HEAD_DIM
        _fetch(tile, TILE * HEAD_DIM)
        _fetch(tile + BLOCK_SIZE * HEAD_DIM, TILE * HEAD_DIM)
    wait_for_previous(OVERLAP)
    for piece in range(begin, stop):
        row = tl.load(piece_row + piece)
        start = tl.load(piece_start + piece)
        end = tl.load(piece_end + piece)
        pieces = tl.load(num_pieces + row)
        table = tables + tl.load(table_start + row)
        heads_of_row = queries + row.to(tl.int64) * query_stride
        if ROTARY > 0:
            angle = angles + tl.load(positions + row).to(tl.int64) * ROTARY
            query = _rotated(
                heads_of_row + heads[:, None] * HEAD_DIM, is_member, angle, query_norm, eps, HEAD_DIM, ROTARY, NORMS
            )
            if QUERY_SCALES:
                query *= tl.load(query_scales + tl.load(positions + row))
            query = query.to(queries.dtype.element_ty)
            if end > tl.load(positions + row):  # the newest token is in this piece
                slot = tl.load(slots + row).to(tl.int64)
                new = heads_of_row + (KV_HEADS * GROUP + kv_head + tl.arange(0, 1)[:, None]) * HEAD_DIM
                is_new = in_head(dims[None, :], HEAD_DIM, mask=tl.arange(0, 1)[:, None] == 0)
                key = _rotated(new, is_new, angle, key_norm, eps, HEAD_DIM, ROTARY, NORMS)
                value = load(new + KV_HEADS * HEAD_DIM + dims[None, :], dims[None, :], HEAD_DIM)
                to = (slot // BLOCK_SIZE * KV_HEADS + kv_head) * (2 * BLOCK_SIZE) + slot % BLOCK_SIZE
                to = cache + to * HEAD_DIM + dims[None, :]
                if dims.numel > HEAD_DIM:
                    store(to, key, is_new)
                    store(to + BLOCK_SIZE * HEAD_DIM, value, is_new)
                else:
                    store(to, key)
                    store(to + BLOCK_SIZE * HEAD_DIM, value)
                tl.debug_barrier()  # because other threads read the stores below
        else:
            query = tl.load(heads_of_row + at, mask=is_member, other=0.0)
        best = tl.full((ROWS,), LOWEST, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        if SINKS:
            is_first = piece == tl.load(first_piece + row)
            sink = tl.load(sinks + heads, mask=members < GROUP, other=0.0).to(tl.float32) * LOG2_E
            best = tl.where(is_first, sink, best)
            total += tl.where(is_first, 1.0, 0.0)
        result = tl.zeros((ROWS, dims.numel), tl.float32)
        before_window = -1
        if WINDOW > 0:  # a row's last piece ends with its newest token
            before_window = tl.load(piece_end + tl.load(first_piece + row) + pieces - 1) - WINDOW - 1
        for first in tl.range(start, end, TILE):
            tokens = first + places
            valid = tokens < end
            if WINDOW > 0:
                valid &= tokens > before_window
            if TILE <= BLOCK_SIZE:  # tiles do not cross blocks: one block id for all of it
                block = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
                base = (block * KV_HEADS + kv_head) * (2 * BLOCK_SIZE * HEAD_DIM)
                offsets = base + (first % BLOCK_SIZE + places) * HEAD_DIM
            else:
                blocks = tl.load(table + tokens // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
                bases = (blocks * KV_HEADS + kv_head) * (2 * BLOCK_SIZE * HEAD_DIM)
                offsets = bases + (tokens % BLOCK_SIZE) * HEAD_DIM
            keys = load(cache + offsets[None, :] + dims[:, None], dims[:, None], HEAD_DIM, mask=valid[None, :])
            scores = capped(tl.dot(query, keys.to(query.dtype), input_precision=PRECISION) * scale, SOFTCAP)
            scores = tl.where(valid[None, :], scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, axis=1))
            weights = tl.exp2(scores - new_best[:, None])
            shrink = tl.exp2(best - new_best)
            total = total * shrink + tl.sum(weights, axis=1)
            at_values = cache + BLOCK_SIZE * HEAD_DIM + offsets[:, None] + dims[None, :]
            values = load(at_values, dims[None, :], HEAD_DIM, mask=valid[:, None]).to(query.dtype)
            result = result * shrink[:, None]
            result = tl.dot(weights.to(values.dtype), values, result, input_precision=PRECISION)
            best = new_best
        result = result / total[:, None]
        if pieces == 1:
            out_at = out + row.to(tl.int64) * (KV_HEADS * GROUP * HEAD_DIM) + at
            tl.store(out_at, result.to(out.dtype.element_ty), mask=is_member)
        else:
            num_heads: tl.constexpr = KV_HEADS * GROUP
            tl.store(mixed + piece * (num_heads * HEAD_DIM) + at, result, mask=is_member)
            tl.store(log_sums + piece * num_heads + heads, best + tl.log2(total), mask=members < GROUP)
            tl.debug_barrier()  # because all threads must have stored before the count rises
            before = tl.atomic_add(arrived + row * KV_HEADS + kv_head, 1, sem="acq_rel")
            if before == pieces - 1:
                tl.store(arrived + row * KV_HEADS + kv_head, 0)
                origin = tl.load(first_piece + row)
                _merge(
                    mixed, log_sums, out, row, kv_head, origin, pieces,
                    KV_HEADS, GROUP, PADDED_GROUP, HEAD_DIM, PIECES_AT_ONCE,
                )  # fmt: skip


@triton.jit
def _rotated(
    start, mask, angle, norm, eps, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, NORMS: tl.constexpr
):  # fmt: skip
    """Heads [n, padded HEAD_DIM], float32, after norm and rotation of each pair (i, i + ROTARY / 2) of the first ROTARY
    dimensions. start: pointers to heads. mask: of heads and dimensions; beyond it all is 0."""
    half: tl.constexpr = ROTARY // 2
    dims = head_dims(HEAD_DIM)[None, :]
    partners = (dims + half) % ROTARY
    values = tl.load(start + dims, mask=mask, other=0.0).to(tl.float32)
    others = tl.load(start + partners, mask=mask, other=0.0).to(tl.float32)
    if NORMS:
        scale = tl.rsqrt(tl.sum(values * values, axis=1) / HEAD_DIM + eps)[:, None]
        values *= scale * load(norm + dims, dims, HEAD_DIM).to(tl.float32)
        others *= scale * tl.load(norm + partners).to(tl.float32)
    cos = tl.load(angle + dims % half)
    sin = tl.load(angle + half + dims % half)
    rotated = values * cos + others * tl.where(dims < half, -sin, sin)
    if ROTARY < HEAD_DIM:
        rotated = tl.where(dims < ROTARY, rotated, values)
    return rotated


@triton.jit
def _fetch(start, SIZE: tl.constexpr):
    """Prefetches SIZE elements into the L2 cache, and not into L1, which could keep stale ones. The asm's result is
    always 0 and unused."""
    line: tl.constexpr = 128 // (start.dtype.element_ty.primitive_bitwidth // 8)
    count: tl.constexpr = SIZE // line
    lines = tl.arange(0, triton.next_power_of_2(count))
    if lines.numel > count:
        lines = tl.minimum(lines, count - 1)  # the last one again
    lines = start + lines * line
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _merge(
    mixed,
    log_sums,
    out,
    row,
    kv_head,
    origin,
    pieces,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Merges the pieces of a row under one KV head. Reads bypass the L1 cache, because other multiprocessors wrote."""
    num_heads: tl.constexpr = KV_HEADS * GROUP
    dims = head_dims(HEAD_DIM)
    members = tl.arange(0, PADDED_GROUP)
    heads = kv_head * GROUP + tl.minimum(members, GROUP - 1)  # padding repeats the last one
    best = tl.full((PADDED_GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED_GROUP,), tl.float32)
    result = tl.zeros((PADDED_GROUP, dims.numel), tl.float32)
    for first in range(0, pieces, AT_ONCE):
        index = first + tl.arange(0, AT_ONCE)
        valid = (index < pieces)[:, None]
        at = (origin + index)[:, None] * num_heads + heads[None, :]
        at_parts = mixed + at[:, :, None] * HEAD_DIM + dims[None, None, :]
        is_part = in_head(dims[None, None, :], HEAD_DIM, mask=valid[:, :, None])
        parts = tl.load(at_parts, mask=is_part, other=0.0, cache_modifier=".cg")
        log_sum = tl.load(log_sums + at, mask=valid, other=float("-inf"), cache_modifier=".cg")
        new_best = tl.maximum(best, tl.max(log_sum, axis=0))
        shrink = tl.exp2(best - new_best)
        weights = tl.exp2(log_sum - new_best[None, :])
        result = result * shrink[:, None] + tl.sum(parts * weights[:, :, None], axis=0)
        total = total * shrink + tl.sum(weights, axis=0)
        best = new_best
    to = out + (row.to(tl.int64) * num_heads + heads[:, None]) * HEAD_DIM + dims[None, :]
    is_member = in_head(dims[None, :], HEAD_DIM, mask=(members < GROUP)[:, None])
    tl.store(to, (result / total[:, None]).to(out.dtype.element_ty), mask=is_member)
