"""Matrix products of 8-bit rows with 8-bit weights whose scales are those of blocks or of rows.

Numbers that share a scale are multiplied and added up first, and then scaled, so that the tensor cores multiply 8 bits.
For few rows the time is that of reading the weights, of which cuBLAS reads 0.5 to 2.7 TB/s on an H200, and this kernel
1.3 to 3.5 with turned tiles.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import dependent_launch, take_turn
from engine.kernels.linear.quantize_rows import QuantizedRows
from engine.kernels.linear.tile_product import Tiles, tile_product
from engine.kernels.silu_mul import silu
from engine.model.fp8_matrix import Fp8Matrix
from runtime.device.quick_launch import QuickLaunch

FEW = Tiles(16, 64, 128, 4, 5)  # up to 16 rows
SOME = Tiles(64, 64, 128, 4, 4)  # up to 128
MANY = Tiles(128, 128, 128, 8, 3)
# Fastest on an H200 (benchmarks/kernel_speed.py). For more rows cuBLAS is faster there.
MAX_ROWS = 128
MAX_GATED_ROWS = 64
MAX_ROWS_IN_PARTS = 256
MIN_PROGRAMS = 256  # about two per multiprocessor


def is_few(rows: QuantizedRows, weight: Fp8Matrix, most: int = MAX_ROWS) -> bool:
    """Whether this kernel is faster than cuBLAS. most: rows, see above."""
    values = rows.values
    fits = len(values) <= most and weight.group == values.shape[1]
    return fits and values.is_cuda and _is_hopper(values.device)


def num_parts(rows: QuantizedRows, weight: Fp8Matrix) -> int:
    """In how many parts few rows' product is computed fastest: two where its columns make too few programs."""
    split = 2 * len(weight) <= 64 * MIN_PROGRAMS and rows.values.shape[1] % 512 == 0
    return 2 if split and is_few(rows, weight, MAX_ROWS_IN_PARTS) else 1


def _tiles(rows: QuantizedRows, weight: Fp8Matrix, gated: bool) -> Tiles:
    num_rows = len(rows.values)
    high = max(16, min(128, triton.next_power_of_2(num_rows)))
    if not is_few(rows, weight, MAX_ROWS_IN_PARTS):
        return FEW if num_rows <= FEW.rows else SOME if num_rows <= 2 * SOME.rows else MANY
    if num_rows > MAX_ROWS:
        return Tiles(high, 128, 128, 8, 4, True)
    if gated:
        return Tiles(high, 64, 128, 4, 6, True) if num_rows <= 32 else Tiles(high, 128, 128, 4, 4, True)
    return Tiles(high, 64, 256, 4, 4, True)


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def fp8_linear(
    rows: QuantizedRows, weight: Fp8Matrix, out: Tensor, *, gated: bool = False, tiles: Tiles | None = None
) -> Tensor:
    """rows @ weight.T in `out` [rows, n], or, in `out` [parts, rows, n], parts whose sum it is. gated: weight is
    [2 * n, k], all gates, then all ups, and `out` takes silu(gate) * up."""
    (num_rows, k), n, group = rows.values.shape, out.shape[-1], weight.group
    tiles = tiles or _tiles(rows, weight, gated)
    inner = tiles.inner if group == k else min(group, tiles.inner)
    columns = tiles.columns // (1 + gated)
    parts = out.shape[0] if out.dim() == 3 else 1
    _fp8_linear[(triton.cdiv(n, columns), triton.cdiv(num_rows, tiles.rows), parts)](
        rows.values,
        rows.scales,
        weight.values,
        weight.scales,
        out,
        num_rows,
        N=n,
        K=k,
        GROUP=group,
        PARTS=parts,
        BLOCK_M=tiles.rows,
        BLOCK_N=columns,
        BLOCK_K=inner,
        EVEN=n % columns == 0 and (k // parts) % inner == 0,
        GATED=gated,
        TURNED=tiles.turned,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **dependent_launch(rows.values),
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
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    TURNED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program computes BLOCK_N columns of the result for BLOCK_M rows. The tile of the product is [weights' rows,
    rows] where it is TURNED, else [rows, weights' rows]."""
    width: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    depth: tl.constexpr = K // PARTS
    begin = tl.program_id(2) * depth
    lanes = tl.arange(0, width)
    if GATED:  # gates and ups take turns
        columns = tl.program_id(0) * BLOCK_N + lanes // 2
        weight_rows = columns + lanes % 2 * N
    else:
        columns = tl.program_id(0) * BLOCK_N + lanes
        weight_rows = columns
    is_column = columns < N
    at_rows = weights + weight_rows.to(tl.int64) * K + begin
    take_turn(OVERLAP)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    is_row = rows < num_rows
    at_values = values + rows.to(tl.int64) * K + begin
    at_scales = weight_scales + weight_rows * (K // GROUP)
    result = tile_product(
        at_values, at_rows, at_scales, is_row, is_column, inner, inner, 1, begin, depth,
        BLOCK_K, GROUP if GROUP < K else 0, EVEN, TURNED, "tf32",
    )  # fmt: skip
    row_scales = tl.load(scales + rows, mask=is_row, other=0.0)
    if GROUP == K:
        result *= tl.load(at_scales, mask=is_column, other=0.0)[None, :]
    result *= row_scales[:, None]
    to_columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        gate, up = tl.split(tl.reshape(result, (BLOCK_M, BLOCK_N, 2)))
        result = silu(gate) * up
    at = out + (tl.program_id(2) * num_rows + rows.to(tl.int64))[:, None] * N + to_columns[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=is_row[:, None] & (to_columns < N)[None, :])
