"""Embedding rows of a step's tokens. Only the device knows the tokens that the step before sampled."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.device.quick_launch import QuickLaunch


def embed(token_ids: Tensor, sampled: Tensor, table: Tensor) -> Tensor:
    """[rows, hidden] of int32 `token_ids`; a negative one, -1 - i, stands for sampled[i]."""
    rows, size = len(token_ids), table.shape[1]
    result = torch.empty(rows, size, dtype=table.dtype, device=table.device)
    block = min(1024, triton.next_power_of_2(size))
    _embed[(rows, triton.cdiv(size, block))](token_ids, sampled, table, result, SIZE=size, BLOCK=block, num_warps=4)
    return result


@QuickLaunch
@triton.jit
def _embed(token_ids, sampled, table, result, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    token = tl.load(token_ids + row)
    if token < 0:
        token = tl.load(sampled - 1 - token)
    values = tl.load(table + token.to(tl.int64) * SIZE + columns, mask=mask)
    tl.store(result + row * SIZE + columns, values, mask=mask)
