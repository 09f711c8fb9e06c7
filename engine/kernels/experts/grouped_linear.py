"""Matrix products of rows with the weights of each row's expert, with the experts' activations inside.

Where weights have 8 bits, so have the rows. Rows of one expert form tiles. How many tiles an expert has is found on the
device: the grid is as large as it can be, and programs without a tile end at once, so a CUDA graph can capture the
launch.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import dependent_launch, take_turn
from engine.kernels.experts.expert_order import ExpertOrder
from engine.kernels.linear.quantize_rows import quantize_rows
from engine.kernels.linear.tile_product import Tiles, tile_product
from engine.model.experts import ClampedGate
from engine.model.fp8_matrix import Fp8Matrix, Weight, operands
from runtime.device.quick_launch import QuickLaunch


class Silu(NamedTuple):
    """silu(gate) * up; all gates, then all ups."""


SILU = Silu()


class Choices(NamedTuple):
    alone: Tiles  # of gates and ups, for one row
    few: Tiles  # up to 12 rows of an expert on average
    shallow: Tiles  # as few, with less than 1 KB of weights to each column
    several: Tiles  # up to 24
    some: Tiles  # up to 64
    many: Tiles


_FEW = Tiles(16, 64, 128, 4, 4)
SMALL = Choices(_FEW, _FEW, _FEW, _FEW, Tiles(64, 128, 64, 4, 4), Tiles(128, 128, 64, 8, 3))  # 98 KB
LARGE = Choices(  # 147 KB
    Tiles(16, 128, 128, 4, 3),
    Tiles(16, 128, 128, 8, 3, True),
    Tiles(16, 128, 64, 8, 4),
    Tiles(32, 256, 128, 4, 2),
    Tiles(64, 256, 64, 8, 3),
    Tiles(128, 256, 64, 8, 3),
)
LARGE_ON = (9, 10)  # compute capabilities, of Hopper and Blackwell: a program may have 227 KB of shared memory
FLOAT_TILES = Tiles(16, 32, 32, 4, 1)


def _tiles(x: Tensor, weights: Weight, order: ExpertOrder, *, gated: bool) -> Tiles:
    if x.dtype == torch.float32:
        return FLOAT_TILES
    choices, rows = LARGE if _is_large(x.device) else SMALL, len(order.pairs) / len(weights)
    if order.first is None:
        return choices.alone if gated else choices.few
    if rows <= 12:
        bits = 8 if isinstance(weights, Fp8Matrix) else 16
        return choices.shallow if weights.shape[2] * bits < 8 << 10 else choices.few
    if rows <= 24:
        return choices.several
    return choices.some if rows <= 64 else choices.many


@cache
def _is_large(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in LARGE_ON


def grouped_linear(
    x: Tensor,
    weights: Weight,
    order: ExpertOrder,
    *,
    pairs_per_row: int = 1,
    biases: Tensor | None = None,
    gate: Silu | ClampedGate | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Row p of the result [pairs, n] is x[p // pairs_per_row] @ weights[expert of pair p].T; weights: [experts, n, k],
    biases: [experts, n].

    gate: `weights` is [experts, 2 * n, k], and the result is what the activation makes of gates and ups; see Experts.
    """
    pairs, (num_experts, n, k) = len(order.pairs), weights.shape
    gated, clamped = gate is not None, gate if isinstance(gate, ClampedGate) else None
    n //= 2 if gated else 1
    out = torch.empty(pairs, n, dtype=x.dtype, device=x.device)
    tiles = tiles or _tiles(x, weights, order, gated=gated)
    values, scales, group = operands(weights, x)
    rows, row_scales = quantize_rows(x) if group else (x, x)
    block_n, inner = _blocks(tiles, n, group or k, gated=gated, eight_bits=group > 0)
    alone = order.first is None
    num_tiles = pairs if alone else pairs // tiles.rows + min(num_experts, pairs)
    _grouped_linear[(triton.cdiv(n, block_n), num_tiles)](
        rows,
        row_scales,
        values,
        scales,
        x if biases is None else biases,
        out,
        order.pairs,
        order.pairs if order.first is None else order.first,
        values.stride(0),
        values.stride(1),
        values.stride(2),
        0.0 if clamped is None else clamped.alpha,
        0.0 if clamped is None else clamped.limit,
        N=n,
        K=k,
        EXPERTS=num_experts,
        PAIRS_PER_ROW=pairs_per_row,
        BLOCK_M=tiles.rows,
        BLOCK_N=block_n,
        BLOCK_K=inner,
        GROUP=group,
        ALONE=alone,
        BIASED=biases is not None,
        GATED=gated,
        CLAMPED=clamped is not None,
        EVEN=n % block_n == 0 and k % inner == 0,
        TURNED=tiles.turned,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **dependent_launch(x),
    )
    return out


def _blocks(tiles: Tiles, n: int, depth: int, *, gated: bool, eight_bits: bool) -> tuple[int, int]:
    """Columns of the result and depth of a program's tile. depth: at most."""
    halves, deepest = 1 + gated, 2 * tiles.inner if eight_bits else tiles.inner  # of 8 bits in as many bytes
    columns = min(tiles.columns, max(32, triton.next_power_of_2(halves * n)))
    return columns // halves, min(deepest, max(32, triton.next_power_of_2(depth)))


@QuickLaunch
@triton.jit
def _grouped_linear(
    x,
    row_scales,
    weights,
    scales,
    biases,
    out,
    pairs,
    first,
    expert_stride,
    row_stride,
    inner_stride,
    alpha,
    limit,
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    ALONE: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    EVEN: tl.constexpr,
    TURNED: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program computes BLOCK_N columns of the result for up to BLOCK_M pairs of one expert. ALONE: for one pair.
    GROUP: weights of a row that share one of `scales`; 0: there are none."""
    take_turn(OVERLAP)
    width: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    tile = tl.program_id(1)
    members = tl.arange(0, BLOCK_M)
    before = tile
    if ALONE:
        expert = tl.load(pairs + tile)
    else:
        experts = tl.arange(0, triton.next_power_of_2(EXPERTS))
        is_expert = experts < EXPERTS
        ends = tl.load(first + experts + 1, mask=is_expert, other=0)
        tiles = (ends - tl.load(first + experts, mask=is_expert, other=0) + BLOCK_M - 1) // BLOCK_M
        is_before = tl.cumsum(tiles, axis=0) <= tile
        expert = tl.sum(is_before.to(tl.int32), axis=0)
        before = tl.sum(tl.where(is_before, tiles, 0), axis=0)
    if expert < EXPERTS:
        if ALONE:
            is_pair = members < 1
            pair = tl.where(is_pair, tile, 0)
        else:
            rows = tl.load(first + expert) + (tile - before) * BLOCK_M + members
            is_pair = rows < tl.load(first + expert + 1)
            pair = tl.load(pairs + rows, mask=is_pair, other=0)
        columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        inner = tl.arange(0, BLOCK_K)
        lanes = tl.arange(0, width)
        weight_rows = tl.program_id(0) * width + lanes  # gates and ups in turn
        is_row = weight_rows < (2 * N if GATED else N)
        if GATED and not CLAMPED:
            is_row = tl.program_id(0) * BLOCK_N + lanes // 2 < N
            weight_rows = tl.program_id(0) * BLOCK_N + lanes // 2 + lanes % 2 * N
        at_x = x + (pair // PAIRS_PER_ROW).to(tl.int64) * K
        at_weights = weights + expert.to(tl.int64) * expert_stride + weight_rows.to(tl.int64) * row_stride
        deep = inner.to(tl.int64) * inner_stride
        at_scales = scales
        if GROUP > 0:
            at_scales += (expert * (2 * N if GATED else N) + weight_rows) * (K // GROUP)
        product = tile_product(
            at_x, at_weights, at_scales, tl.full((BLOCK_M,), True, tl.int1), is_row, inner, deep, inner_stride, 0, K,
            BLOCK_K, GROUP if GROUP < K else 0, EVEN, TURNED, PRECISION,
        )  # fmt: skip
        if GROUP == K:
            product *= tl.load(at_scales, mask=is_row, other=0.0)[None, :]
        if GROUP > 0:
            product *= tl.load(row_scales + pair // PAIRS_PER_ROW, mask=is_pair, other=0.0)[:, None]
        if BIASED:
            at_biases = biases + expert * (2 * N if GATED else N) + weight_rows
            product += tl.load(at_biases, mask=is_row, other=0.0).to(tl.float32)[None, :]
        if GATED:
            gate, up = tl.split(tl.reshape(product, (BLOCK_M, BLOCK_N, 2)))
            if CLAMPED:
                gate = tl.minimum(gate, limit)
                product = (tl.minimum(tl.maximum(up, -limit), limit) + 1.0) * gate * tl.sigmoid(alpha * gate)
            else:
                product = gate * tl.sigmoid(gate) * up
        at = out + pair.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(at, product.to(out.dtype.element_ty), mask=is_pair[:, None] & (columns < N)[None, :])
