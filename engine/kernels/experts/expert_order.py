"""The pairs of a token and one of its experts in the order of the experts: a counting sort."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import dependent_launch, take_turn
from runtime.device.quick_launch import QuickLaunch

AT_ONCE = 4096  # pairs that a program loads


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """int32. Pair p is place p % per_token of token p // per_token. Expert e has `pairs[first[e] : first[e + 1]]`, in
    ascending order. Without `first`, `pairs` are the experts of all pairs."""

    pairs: Tensor  # [tokens * per_token]
    first: Tensor | None  # [experts + 1]


def unordered(chosen: Tensor) -> ExpertOrder:
    """Each pair for itself: for so few tokens that hardly two have an expert in common."""
    return ExpertOrder(chosen.view(-1), None)


def expert_order(chosen: Tensor, num_experts: int) -> ExpertOrder:
    """chosen: int32 [num_tokens, per_token], the experts of each token."""
    count = chosen.numel()
    pairs = torch.empty(count, dtype=torch.int32, device=chosen.device)
    first = torch.empty(num_experts + 1, dtype=torch.int32, device=chosen.device)
    _order[(num_experts,)](
        chosen,
        pairs,
        first,
        count,
        EXPERTS=num_experts,
        AT_ONCE=min(AT_ONCE, triton.next_power_of_2(count)),
        num_warps=4,
        **dependent_launch(chosen),
    )
    return ExpertOrder(pairs, first)


@QuickLaunch
@triton.jit
def _order(chosen, pairs, first, count, EXPERTS: tl.constexpr, AT_ONCE: tl.constexpr, OVERLAP: tl.constexpr):
    """A program takes one expert, and counts the pairs of those before it."""
    take_turn(OVERLAP)
    expert = tl.program_id(0)
    places = tl.arange(0, AT_ONCE)
    before = tl.zeros((AT_ONCE,), tl.int32)
    for start in range(0, count, AT_ONCE):
        experts = tl.load(chosen + start + places, mask=start + places < count, other=EXPERTS)
        before += (experts < expert).to(tl.int32)
    at = tl.sum(before, axis=0)
    tl.store(first + expert, at)
    for start in range(0, count, AT_ONCE):
        experts = tl.load(chosen + start + places, mask=start + places < count, other=EXPERTS)
        own = (experts == expert).to(tl.int32)
        tl.store(pairs + at + tl.cumsum(own, axis=0) - own, start + places, mask=own > 0)
        at += tl.sum(own, axis=0)
    if expert == EXPERTS - 1:
        tl.store(first + EXPERTS, at)
