"""Matrix products for one or two rows, whose time is that of reading the weights; cuBLAS uses too little of the memory
bandwidth there.

The same pass computes the RMS norm of the input, silu(gate) * up of the result, and the addition to the residual
stream. A program holds all of its weights in registers, and loads them before it waits for the kernel that computes its
input, so the memory stays busy from one product to the next.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import dependent_launch, start_next, wait_for_previous
from engine.kernels.silu_mul import silu
from engine.model.fp8_matrix import Weight, operands
from runtime.device.quick_launch import QuickLaunch

# Fastest on an H200 (benchmarks/kernel_speed.py).
MAX_ROWS = 2
MAX_K_OF_TWO = 3072  # every program reads the second row again; for larger k cuBLAS is faster
MAX_K = 16384
TILE = 8192  # weights that a program holds; more when they would be fewer than MIN_WEIGHT_ROWS rows
MIN_WEIGHT_ROWS = 4
MAX_TILE = 32768  # weights that the registers hold
MIN_PROGRAMS = 256  # about two per multiprocessor


def is_small(x: Tensor) -> bool:
    return len(x) <= MAX_ROWS and x.shape[1] <= (MAX_K if len(x) == 1 else MAX_K_OF_TWO)


def small_linear(
    x: Tensor,
    weight: Weight,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    add_to: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x @ weight.T for up to MAX_ROWS rows: [rows, k] and [n, k] -> [rows, n], in `out` if there is one.

    norm: weights [k] of an RMS norm of x before the product. gated: `weight` is [2 * n, k], and the result is silu of
    the product's first half times its second half. add_to: [rows, n]; the product is added to it, and it is returned.
    """
    assert is_small(x)
    rows, (n, k) = len(x), weight.shape
    if gated:
        n //= 2
    if add_to is not None:
        out = add_to
    elif out is None:
        out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    block_k = triton.next_power_of_2(k)
    tile = min(max(TILE, MIN_WEIGHT_ROWS * block_k), MAX_TILE)
    block_n = max(1, tile // block_k // (2 if gated else 1))
    while block_n > 1 and triton.cdiv(n, block_n) < MIN_PROGRAMS:
        block_n //= 2
    values, scales, group = operands(weight, x)
    _small_linear[(triton.cdiv(n, block_n),)](
        x,
        x if norm is None else norm,
        values,
        scales,
        out,
        eps,
        ROWS=rows,
        N=n,
        K=k,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP=group,
        NORM=norm is not None,
        GATED=gated,
        ADD=add_to is not None,
        num_warps=4 if tile <= 8192 else 8,
        **dependent_launch(x),
    )
    return out


@QuickLaunch
@triton.jit
def _small_linear(
    x,
    norm,
    weight,
    scales,
    out,
    eps,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program computes BLOCK_N columns of the result, for all rows. GROUP: weights of a row that share one of
    `scales`; 0: there are none."""
    start_next(OVERLAP)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    is_column = columns < N
    in_k = inner < K  # folded away where BLOCK_K is K
    at = weight + columns.to(tl.int64)[:, None] * K + inner[None, :]
    mask = is_column[:, None] & in_k[None, :]
    weights = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    if GATED:
        up_weights = tl.load(at + N * K, mask=mask, other=0.0, eviction_policy="evict_first")
    if GROUP == K:
        row_scales = tl.load(scales + columns, mask=is_column, other=0.0)
        if GATED:
            up_scales = tl.load(scales + N + columns, mask=is_column, other=0.0)
    elif GROUP > 0:
        at_scales = scales + columns[:, None] * (K // GROUP) + inner[None, :] // GROUP
        weights = weights.to(tl.float32) * tl.load(at_scales, mask=mask, other=0.0)
        if GATED:
            up_weights = up_weights.to(tl.float32) * tl.load(at_scales + N * (K // GROUP), mask=mask, other=0.0)
    if NORM:
        norms = tl.load(norm + inner, mask=in_k, other=0.0)
    wait_for_previous(OVERLAP)
    for row in tl.static_range(ROWS):
        values = tl.load(x + row * K + inner, mask=in_k, other=0.0).to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(values * values, axis=0) / K + eps)
            values *= norms.to(tl.float32)
        result = tl.sum(weights.to(tl.float32) * values[None, :], axis=1)
        if NORM:  # a factor of the whole row, applied to the result
            result *= scale
        if GROUP == K:
            result *= row_scales
        if GATED:
            up = tl.sum(up_weights.to(tl.float32) * values[None, :], axis=1)
            if GROUP == K:
                up *= up_scales
            if NORM:
                up *= scale
            result = silu(result) * up
        to = out + row * N + columns
        if ADD:
            result += tl.load(to, mask=is_column, other=0.0).to(tl.float32)
        tl.store(to, result.to(out.dtype.element_ty), mask=is_column)
