"""The work on a token's heads between projection and attention, in one pass: queries and keys are normalised
and rotated, keys and values are stored in their slot of the paged cache."""

import msgspec
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import dependent_launch, start_next, wait_for_previous
from engine.model.fp8_matrix import F8_MAX
from runtime.device.quick_launch import QuickLaunch

_F8_MAX: tl.constexpr = tl.constexpr(F8_MAX)
HEADS_AT_ONCE = 8
# Fastest on an H200 (benchmarks/kernel_speed.py): few tokens need low latency, many need little work per program.
MANY_TOKENS = 2048
WARPS_FOR_FEW, WARPS_FOR_MANY = 4, 1


class Rotation(msgspec.Struct, frozen=True):
    """How tokens' heads are normalised and rotated, and where their keys and values are stored."""

    slots: Tensor  # int32 [tokens], block * block_size + offset; negative: stored nowhere (padding)
    positions: Tensor  # int32 [tokens]
    table: Tensor  # float32 [positions, dim], the cosines of a position and then its sines; dim: of the first
    # dimensions of a head, which are rotated
    query_norm: Tensor | None  # weights [head_dim]; both norms or neither
    key_norm: Tensor | None
    eps: float
    query_scales: Tensor | None = None  # float32 [positions], of rotated queries


def rotate_store(qkv: Tensor, layer_cache: Tensor, rotation: Rotation) -> Tensor:
    """Returns the queries [tokens, heads, head_dim], written over their part of `qkv` [tokens, heads + 2 * kv_heads,
    head_dim]. layer_cache: [blocks, kv_heads, 2, block_size, head_dim], of their dtype or of float8_e4m3fn."""
    tokens, total, head_dim = qkv.shape
    _, kv_heads, _, block_size, _ = layer_cache.shape
    heads = total - 2 * kv_heads
    query_groups, key_groups = triton.cdiv(heads, HEADS_AT_ONCE), triton.cdiv(kv_heads, HEADS_AT_ONCE)
    rotary = rotation.table.shape[-1]
    assert rotary == head_dim or rotation.query_norm is None, "heads that are normalised are rotated whole"
    _rotate_store[(tokens, query_groups + key_groups)](
        qkv,
        layer_cache,
        rotation.slots,
        rotation.positions,
        rotation.table,
        rotation.table if rotation.query_norm is None else rotation.query_norm,
        rotation.table if rotation.key_norm is None else rotation.key_norm,
        rotation.table if rotation.query_scales is None else rotation.query_scales,
        rotation.eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HALF=rotary // 2,
        HALF_PADDED=triton.next_power_of_2(rotary // 2),
        TAIL_PADDED=triton.next_power_of_2(head_dim - rotary) if rotary < head_dim else 0,
        AT_ONCE=HEADS_AT_ONCE,
        QUERY_GROUPS=query_groups,
        NORMS=rotation.query_norm is not None,
        QUERY_SCALES=rotation.query_scales is not None,
        num_warps=WARPS_FOR_MANY if tokens >= MANY_TOKENS else WARPS_FOR_FEW,
        **dependent_launch(qkv),
    )
    return qkv[:, :heads]


@QuickLaunch
@triton.jit
def _rotate_store(
    qkv,
    cache,
    slots,
    positions,
    table,
    query_norm,
    key_norm,
    query_scales,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    TAIL_PADDED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    QUERY_GROUPS: tl.constexpr,
    NORMS: tl.constexpr,
    QUERY_SCALES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program takes one token and up to AT_ONCE heads: of the queries, or of the keys together with their values."""
    start_next(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    dims = tl.arange(0, HALF_PADDED)[None, :]
    in_half = dims < HALF
    position = tl.load(positions + token).to(tl.int64)
    cos = tl.load(table + position * (2 * HALF) + dims, mask=in_half, other=0.0)
    sin = tl.load(table + position * (2 * HALF) + HALF + dims, mask=in_half, other=0.0)
    slot = tl.load(slots + token).to(tl.int64)
    wait_for_previous(OVERLAP)
    row = qkv + token * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    if group < QUERY_GROUPS:
        heads = group * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
        mask = (heads < HEADS) & in_half
        at = row + heads * HEAD_DIM + dims
        first, second = _rotated(at, mask, cos, sin, query_norm, dims, in_half, eps, HALF, NORMS)
        if QUERY_SCALES:
            factor = tl.load(query_scales + position)
            first *= factor
            second *= factor
            if TAIL_PADDED > 0:
                at_tail, tail_mask = _tail(row + heads * HEAD_DIM, heads < HEADS, HEAD_DIM, HALF, TAIL_PADDED)
                tail = tl.load(at_tail, mask=tail_mask, other=0.0).to(tl.float32) * factor
                tl.store(at_tail, tail.to(qkv.dtype.element_ty), mask=tail_mask)
        tl.store(at, first.to(qkv.dtype.element_ty), mask=mask)
        tl.store(at + HALF, second.to(qkv.dtype.element_ty), mask=mask)
    else:
        if slot >= 0:
            heads = (group - QUERY_GROUPS) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
            mask = (heads < KV_HEADS) & in_half
            keys = row + (HEADS + heads) * HEAD_DIM
            first, second = _rotated(keys + dims, mask, cos, sin, key_norm, dims, in_half, eps, HALF, NORMS)
            to = cache + ((slot // BLOCK_SIZE * KV_HEADS + heads) * (2 * BLOCK_SIZE) + slot % BLOCK_SIZE) * HEAD_DIM
            store(to + dims, first, mask)
            store(to + dims + HALF, second, mask)
            values, to_values = keys + KV_HEADS * HEAD_DIM, to + BLOCK_SIZE * HEAD_DIM
            store(to_values + dims, tl.load(values + dims, mask=mask), mask)
            store(to_values + dims + HALF, tl.load(values + dims + HALF, mask=mask), mask)
            if TAIL_PADDED > 0:
                at_tail, tail_mask = _tail(keys, heads < KV_HEADS, HEAD_DIM, HALF, TAIL_PADDED)
                to_tail, _ = _tail(to, heads < KV_HEADS, HEAD_DIM, HALF, TAIL_PADDED)
                store(to_tail, tl.load(at_tail, mask=tail_mask), tail_mask)
                store(
                    to_tail + BLOCK_SIZE * HEAD_DIM, tl.load(at_tail + KV_HEADS * HEAD_DIM, mask=tail_mask), tail_mask
                )


@triton.jit
def store(to, values, mask=None):
    """Stores keys or values in a cache. In 8 bits what is beyond the largest number becomes that."""
    kept: tl.constexpr = to.dtype.scalar.element_ty
    if kept == tl.float8e4nv:
        values = tl.clamp(values.to(tl.float32), -_F8_MAX, _F8_MAX)
    tl.store(to, values.to(kept), mask=mask)


@triton.jit
def _tail(start, mask, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr):
    """Where the dimensions of heads lie that are not rotated, and which of the addresses are such. start: of heads."""
    dims = 2 * HALF + tl.arange(0, PADDED)[None, :]
    return start + dims, mask & (dims < HEAD_DIM)


@triton.jit
def _rotated(at, mask, cos, sin, norm, dims, in_half, eps, HALF: tl.constexpr, NORMS: tl.constexpr):
    """Both halves of heads, float32, after norm and rotation of each pair (i, i + HALF)."""
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORMS:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        first *= scale * tl.load(norm + dims, mask=in_half, other=0.0).to(tl.float32)
        second *= scale * tl.load(norm + HALF + dims, mask=in_half, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin
