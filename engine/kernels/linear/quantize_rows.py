"""Activations in 8 bits: each row, a token's, is divided by a scale of its own."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import dependent_launch, take_turn
from engine.model.fp8_matrix import F8, F8_MAX, LEAST_SCALE
from runtime.device.quick_launch import QuickLaunch


class QuantizedRows(NamedTuple):
    """Rows that are near values * scales. The largest number of a row is F8_MAX."""

    values: Tensor  # [rows, size], float8_e4m3fn
    scales: Tensor  # [rows, 1], float32


def quantize_rows(x: Tensor) -> QuantizedRows:
    """x: [rows, size], contiguous."""
    rows, size = x.shape
    values = torch.empty(rows, size, dtype=F8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    _quantize_rows[(rows,)](
        x,
        values,
        scales,
        SIZE=size,
        BLOCK=block,
        MAX=F8_MAX,
        LEAST=LEAST_SCALE,
        num_warps=min(16, max(1, block // 512)),
        **dependent_launch(x),
    )
    return QuantizedRows(values, scales)


@QuickLaunch
@triton.jit
def _quantize_rows(
    x,
    values,
    scales,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX: tl.constexpr,
    LEAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    numbers = tl.load(x + row * SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    numbers, scale = quantized(numbers, MAX, LEAST)
    tl.store(scales + row, scale)
    tl.store(values + row * SIZE + columns, numbers.to(values.dtype.element_ty), mask=mask)


@triton.jit
def quantized(numbers, MAX: tl.constexpr, LEAST: tl.constexpr):
    """A row divided by its scale, and the scale."""
    scale = tl.maximum(tl.max(tl.abs(numbers), axis=0) / MAX, LEAST)
    return numbers / scale, scale
