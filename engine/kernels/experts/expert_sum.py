"""The weighted sum of what a token's experts have computed."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import dependent_launch, take_turn
from runtime.device.quick_launch import QuickLaunch

COLUMNS = 1024  # that a program takes


def expert_sum(outputs: Tensor, weights: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
    """[num_tokens * per_token, hidden] and [num_tokens, per_token] -> [num_tokens, hidden], in `out` if given. add: to
    what `out` holds."""
    tokens, per_token = weights.shape
    hidden = outputs.shape[1]
    if out is None:
        out = torch.empty(tokens, hidden, dtype=outputs.dtype, device=outputs.device)
    columns = min(COLUMNS, triton.next_power_of_2(hidden))
    _expert_sum[(tokens, triton.cdiv(hidden, columns))](
        outputs,
        weights,
        out,
        HIDDEN=hidden,
        PER_TOKEN=per_token,
        COLUMNS=columns,
        ADD=add,
        num_warps=4,
        **dependent_launch(outputs),
    )
    return out


@QuickLaunch
@triton.jit
def _expert_sum(
    outputs,
    weights,
    out,
    HIDDEN: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    take_turn(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < HIDDEN
    total = weighted_sum(outputs, weights, token, columns, mask, HIDDEN, PER_TOKEN)
    to = out + token * HIDDEN + columns
    if ADD:
        total += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def weighted_sum(outputs, weights, token, columns, mask, HIDDEN: tl.constexpr, PER_TOKEN: tl.constexpr):
    """These columns of a token's sum, float32."""
    total = tl.zeros((columns.shape[0],), tl.float32)
    for place in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + place
        values = tl.load(outputs + pair * HIDDEN + columns, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * values
    return total
