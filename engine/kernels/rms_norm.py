"""RMS norm of the residual stream, with an addition to the stream before it."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import dependent_launch, start_next, wait_for_previous
from engine.kernels.experts.expert_sum import weighted_sum
from engine.kernels.linear.quantize_rows import QuantizedRows, quantized
from engine.model.fp8_matrix import F8, F8_MAX, LEAST_SCALE
from runtime.device.quick_launch import QuickLaunch


@dataclass(frozen=True, slots=True)
class Addition:
    """What a norm adds to the stream [rows, size] before it: the sum of at most two parts like the stream. With
    `weights`, float32 [rows, count], there is one part [rows * count, size], and its weighted sum is added."""

    parts: tuple[Tensor, ...] = ()
    weights: Tensor | None = None


NOTHING = Addition()


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, addition: Addition = NOTHING) -> Tensor:
    """hidden [rows, size], contiguous, normalised over its last dimension and multiplied by weight [size]. First the
    addition is made to `hidden`, in place."""
    normed = torch.empty_like(hidden)
    _launch(hidden, weight, eps, addition, normed, None)
    return normed


def quantized_norm(hidden: Tensor, weight: Tensor, eps: float, addition: Addition = NOTHING) -> QuantizedRows:
    """rms_norm in 8 bits."""
    values = torch.empty_like(hidden, dtype=F8)
    scales = torch.empty(len(hidden), 1, dtype=torch.float32, device=hidden.device)
    _launch(hidden, weight, eps, addition, values, scales)
    return QuantizedRows(values, scales)


def _launch(
    hidden: Tensor, weight: Tensor, eps: float, addition: Addition, normed: Tensor, scales: Tensor | None
) -> None:
    rows, size = hidden.shape
    block = triton.next_power_of_2(size)
    parts, shares = addition.parts, addition.weights
    first, second = (*parts, hidden, hidden)[:2]
    _rms_norm[(rows,)](
        hidden,
        first,
        second if shares is None else shares,
        weight,
        normed,
        normed if scales is None else scales,
        eps,
        SIZE=size,
        BLOCK=block,
        PARTS=len(parts) if shares is None else shares.shape[1],
        WEIGHTED=shares is not None,
        QUANTIZED=scales is not None,
        MAX=F8_MAX,
        LEAST=LEAST_SCALE,
        num_warps=min(8, max(1, block // 512)),
        **dependent_launch(hidden),
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
    WEIGHTED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    MAX: tl.constexpr,
    LEAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    at = row * SIZE + columns
    mask = columns < SIZE
    weights = tl.load(weight + columns, mask=mask, other=0.0)
    wait_for_previous(OVERLAP)
    values = tl.load(hidden + at, mask=mask, other=0.0).to(tl.float32)
    if PARTS > 0:
        if WEIGHTED:
            total = weighted_sum(first, second, row, columns, mask, SIZE, PARTS)
        else:
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
        tl.store(scales + row, row_scale)
    tl.store(normed + at, result.to(normed.dtype.element_ty), mask=mask)
