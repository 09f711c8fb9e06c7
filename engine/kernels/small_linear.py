"""Matrix products for one to four rows, where reading the weights is all that counts: cuBLAS keeps too little of the
memory busy there.

What comes before and after the product goes into the same pass: the RMS norm of the input, silu(gate) * up, and the
addition to the residual stream.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 4
# What benchmarks/kernel_speed.py found best on an H200.
TILE = 8192  # weights that a program holds at once, for one row
MAX_BLOCK_K = 2048
NUM_WARPS = 4
NUM_STAGES = 2
MIN_PROGRAMS = 256  # about two for each multiprocessor


def small_linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    silu: bool = False,
    add_to: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x @ weight.T for up to MAX_ROWS rows: [rows, k] and [n, k] -> [rows, n], in `out` if there is one.

    norm: weights [k] of the RMS norm that x goes through first. silu: x is [rows, 2 * k], gate and up. add_to [rows, n]
    grows in place by the product, and is what comes back.
    """
    rows, (n, k) = len(x), weight.shape
    assert rows <= MAX_ROWS
    if add_to is not None:
        out = add_to
    elif out is None:
        out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    padded_rows = triton.next_power_of_2(rows)
    block_k = min(MAX_BLOCK_K, triton.next_power_of_2(k))
    block_n = max(1, TILE // padded_rows // block_k)
    while block_n > 1 and triton.cdiv(n, block_n) < MIN_PROGRAMS:
        block_n //= 2
    _small_linear[(triton.cdiv(n, block_n),)](
        x,
        x if norm is None else norm,
        weight,
        out,
        eps,
        ROWS=rows,
        PADDED_ROWS=padded_rows,
        N=n,
        K=k,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        NORM=norm is not None,
        SILU=silu,
        ADD=add_to is not None,
        NUM_STAGES=NUM_STAGES,
        num_warps=NUM_WARPS,
    )
    return out


def small_linear_reference(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    silu: bool = False,
    add_to: Tensor | None = None,
) -> Tensor:
    wide = x.double()
    if norm is not None:
        wide = torch.rms_norm(wide, norm.shape, norm.double(), eps)
    if silu:
        gate, up = wide.chunk(2, dim=-1)
        wide = F.silu(gate) * up
    product = wide @ weight.double().t()
    return product if add_to is None else add_to.double() + product


@triton.jit
def _small_linear(
    x,
    norm,
    weight,
    out,
    eps,
    ROWS: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    SILU: tl.constexpr,
    ADD: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """A program is BLOCK_N columns of the result, for all rows."""
    x_width: tl.constexpr = 2 * K if SILU else K
    rows = tl.arange(0, PADDED_ROWS)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = (rows < ROWS)[:, None]
    is_column = (columns < N)[:, None]
    weight_rows = weight + columns.to(tl.int64)[:, None] * K
    products = tl.zeros((PADDED_ROWS, BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((PADDED_ROWS, BLOCK_K), tl.float32)
    for first in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        inner = first + tl.arange(0, BLOCK_K)[None, :]
        in_k = inner < K  # folded away where BLOCK_K divides K
        weights = tl.load(weight_rows + inner, mask=is_column & in_k, other=0.0).to(tl.float32)
        values = tl.load(x + rows[:, None] * x_width + inner, mask=is_row & in_k, other=0.0).to(tl.float32)
        if SILU:
            up = tl.load(x + rows[:, None] * x_width + K + inner, mask=is_row & in_k, other=0.0).to(tl.float32)
            shrunk = tl.exp(-tl.abs(values))
            values = values * tl.where(values >= 0, 1.0, shrunk) / (1.0 + shrunk) * up
        if NORM:  # the scale of a row is a common factor, applied at the end
            squares += values * values
            values *= tl.load(norm + inner, mask=in_k, other=0.0).to(tl.float32)
        products += weights[None, :, :] * values[:, None, :]
    result = tl.sum(products, axis=2)
    if NORM:
        result *= tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[:, None]
    to = out + rows[:, None] * N + columns[None, :]
    mask = is_row & (columns < N)[None, :]
    if ADD:
        result += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, result.to(out.dtype.element_ty), mask=mask)
