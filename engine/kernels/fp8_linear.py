"""Matrix products of 8-bit rows with 8-bit weights whose scales are those of blocks or of rows.

Numbers that share a scale are multiplied and added up first, and then scaled, so that the tensor cores multiply 8 bits.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.dependent_launch import dependent_launch
from engine.model.fp8_matrix import Fp8Matrix
from runtime.device.quick_launch import QuickLaunch


class Tiles(NamedTuple):
    rows: int
    columns: int
    inner: int  # at most
    num_warps: int
    num_stages: int


FEW = Tiles(16, 64, 128, 4, 5)  # up to 16 rows
SOME = Tiles(64, 64, 128, 4, 4)  # up to 128
MANY = Tiles(128, 128, 128, 8, 3)


def fp8_linear(values: Tensor, scales: Tensor, weight: Fp8Matrix, out: Tensor, *, tiles: Tiles | None = None) -> Tensor:
    """(values * scales) @ weight.T in `out` [rows, n]: values [rows, k] of float8_e4m3fn, scales [rows, 1]."""
    (rows, k), n, group = values.shape, len(weight), weight.group
    tiles = tiles or (FEW if rows <= FEW.rows else SOME if rows <= 2 * SOME.rows else MANY)
    inner = tiles.inner if group == k else min(group, tiles.inner)
    overlap = dependent_launch(values)
    _fp8_linear[(triton.cdiv(n, tiles.columns), triton.cdiv(rows, tiles.rows))](
        values,
        scales,
        weight.values,
        weight.scales,
        out,
        rows,
        N=n,
        K=k,
        GROUP=group,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.columns,
        BLOCK_K=inner,
        EVEN=n % tiles.columns == 0 and k % inner == 0,
        OVERLAP=overlap,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        launch_pdl=overlap,
    )
    return out


@QuickLaunch
@triton.jit
def _fp8_linear(
    values,
    scales,
    weights,
    weight_scales,
    out,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    is_row, is_column = rows < num_rows, columns < N
    at_values = values + rows.to(tl.int64)[:, None] * K + inner[None, :]
    at_weights = weights + columns.to(tl.int64)[None, :] * K + inner[:, None]
    at_scales = weight_scales + columns * (K // GROUP)
    result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        if EVEN:
            left = tl.load(at_values, mask=is_row[:, None], other=0.0)
            right = tl.load(at_weights)
        else:
            in_k = start + inner < K
            left = tl.load(at_values, mask=is_row[:, None] & in_k[None, :], other=0.0)
            right = tl.load(at_weights, mask=in_k[:, None] & is_column[None, :], other=0.0)
        if GROUP < K:
            scale = tl.load(at_scales + start // GROUP, mask=is_column, other=0.0)
            result += tl.dot(left, right) * scale[None, :]
        else:
            result = tl.dot(left, right, result)
        at_values += BLOCK_K
        at_weights += BLOCK_K
    if GROUP == K:
        result *= tl.load(at_scales, mask=is_column, other=0.0)[None, :]
    result *= tl.load(scales + rows, mask=is_row, other=0.0)[:, None]
    at = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
