"""RMS norm of the residual stream, with additions to the stream before it."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.dependent_launch import dependent_launch
from engine.kernels.quantize_rows import QuantizedRows, quantized
from engine.model.fp8_matrix import F8, F8_MAX, LEAST_SCALE
from runtime.device.quick_launch import QuickLaunch


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, parts: tuple[Tensor, ...] = ()) -> Tensor:
    """hidden [rows, size], contiguous, normalised over its last dimension and multiplied by weight [size].

    parts: at most two tensors like `hidden`; their sum is first added to `hidden`, in place.
    """
    normed = torch.empty_like(hidden)
    _launch(hidden, weight, eps, parts, normed, None)
    return normed


def quantized_norm(hidden: Tensor, weight: Tensor, eps: float, parts: tuple[Tensor, ...] = ()) -> QuantizedRows:
    """rms_norm in 8 bits."""
    values = torch.empty_like(hidden, dtype=F8)
    scales = torch.empty(len(hidden), 1, dtype=torch.float32, device=hidden.device)
    _launch(hidden, weight, eps, parts, values, scales)
    return QuantizedRows(values, scales)


def _launch(
    hidden: Tensor, weight: Tensor, eps: float, parts: tuple[Tensor, ...], normed: Tensor, scales: Tensor | None
) -> None:
    rows, size = hidden.shape
    block = triton.next_power_of_2(size)
    overlap = dependent_launch(hidden)
    first, second = (*parts, hidden, hidden)[:2]
    _rms_norm[(rows,)](
        hidden,
        first,
        second,
        weight,
        normed,
        normed if scales is None else scales,
        eps,
        SIZE=size,
        BLOCK=block,
        PARTS=len(parts),
        QUANTIZED=scales is not None,
        MAX=F8_MAX,
        LEAST=LEAST_SCALE,
        OVERLAP=overlap,
        num_warps=min(8, max(1, block // 512)),
        launch_pdl=overlap,
    )


@QuickLaunch
@triton.jit
def _rms_norm(
    hidden,
    first,
    second,
    weight,
    normed,
    scales,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    MAX: tl.constexpr,
    LEAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    columns = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * SIZE + columns
    mask = columns < SIZE
    weights = tl.load(weight + columns, mask=mask, other=0.0)
    if OVERLAP:
        gdc_wait()
    values = tl.load(hidden + at, mask=mask, other=0.0).to(tl.float32)
    if PARTS > 0:
        total = tl.load(first + at, mask=mask, other=0.0).to(tl.float32)
        if PARTS > 1:
            total += tl.load(second + at, mask=mask, other=0.0).to(tl.float32)
        grown = (total + values).to(hidden.dtype.element_ty)
        tl.store(hidden + at, grown, mask=mask)
        values = grown.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    result = values * scale * weights.to(tl.float32)
    if QUANTIZED:
        result, row_scale = quantized(result, MAX, LEAST)
        tl.store(scales + tl.program_id(0), row_scale)
    tl.store(normed + at, result.to(normed.dtype.element_ty), mask=mask)
