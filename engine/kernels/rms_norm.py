"""RMS norm of the residual stream, fused with the addition that comes before it: one pass over the hidden states."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.dependent_launch import dependent_launch


def add_rms_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """hidden += delta, in place; returns hidden normalised over its last dimension. All [rows, size], contiguous."""
    rows, size = hidden.shape
    normed = torch.empty_like(hidden)
    block = triton.next_power_of_2(size)
    overlap = dependent_launch(hidden)
    _add_rms_norm[(rows,)](
        hidden,
        hidden if delta is None else delta,
        weight,
        normed,
        eps,
        SIZE=size,
        BLOCK=block,
        HAS_DELTA=delta is not None,
        OVERLAP=overlap,
        num_warps=min(8, max(1, block // 512)),
        launch_pdl=overlap,
    )
    return normed


def add_rms_norm_reference(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(hidden + delta, its norm) in float32 or better, rounded once."""
    total = hidden if delta is None else hidden + delta
    wide = total.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()
    return total, normed.to(hidden.dtype)


@triton.jit
def _add_rms_norm(
    hidden,
    delta,
    weight,
    normed,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    at = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    weights = tl.load(weight + columns, mask=mask, other=0.0)
    if OVERLAP:
        gdc_wait()
    values = tl.load(hidden + at + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        values += tl.load(delta + at + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(hidden.dtype.element_ty)
        tl.store(hidden + at + columns, rounded, mask=mask)
        values = rounded.to(tl.float32)  # what the next layer adds to is what is normalised here
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    tl.store(normed + at + columns, (values * scale * weights.to(tl.float32)).to(normed.dtype.element_ty), mask=mask)
