"""silu(gate) * up over the fused projection, without a copy of its halves."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import dependent_launch, take_turn
from runtime.device.quick_launch import QuickLaunch

_BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """[rows, 2 * size], contiguous -> [rows, size]"""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    result = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(rows, triton.cdiv(size, _BLOCK))](
        gate_up, result, SIZE=size, BLOCK=_BLOCK, num_warps=4, **dependent_launch(gate_up)
    )
    return result


@QuickLaunch
@triton.jit
def _silu_mul(gate_up, result, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    take_turn(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(gate_up + row * (2 * SIZE) + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(result + row * SIZE + columns, (silu(gate) * up).to(result.dtype.element_ty), mask=mask)


@triton.jit
def silu(gate):
    shrunk = tl.exp(-tl.abs(gate))  # never overflows
    return gate * tl.where(gate >= 0, 1.0, shrunk) / (1.0 + shrunk)
