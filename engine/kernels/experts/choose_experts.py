"""The experts of each token: those with the highest scores, weighted by the softmax of the scores."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.dependent_launch import dependent_launch, take_turn
from engine.model.experts import Chosen
from runtime.device.quick_launch import QuickLaunch


def choose_experts(scores: Tensor, per_token: int, *, normed: bool) -> Chosen:
    """scores: [num_tokens, experts], contiguous; NaN chooses valid experts. normed: whether a token's weights sum to
    one. Numbers are int32."""
    tokens, experts = scores.shape
    weights = torch.empty(tokens, per_token, dtype=torch.float32, device=scores.device)
    chosen = torch.empty(tokens, per_token, dtype=torch.int32, device=scores.device)
    _choose[(tokens,)](
        scores,
        weights,
        chosen,
        EXPERTS=experts,
        EXPERTS_PADDED=triton.next_power_of_2(experts),
        PER_TOKEN=per_token,
        PLACES=triton.next_power_of_2(per_token),
        NORMED=normed,
        num_warps=1,
        **dependent_launch(scores),
    )
    return Chosen(weights, chosen)


@QuickLaunch
@triton.jit
def _choose(
    scores,
    weights,
    chosen,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PLACES: tl.constexpr,
    NORMED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program takes one token. Among equal scores the first expert is chosen."""
    take_turn(OVERLAP)
    token = tl.program_id(0)
    experts = tl.arange(0, EXPERTS_PADDED)
    places = tl.arange(0, PLACES)
    left = tl.load(scores + token * EXPERTS + experts, mask=experts < EXPERTS, other=float("-inf")).to(tl.float32)
    best = tl.max(left, axis=0)
    total = tl.sum(tl.exp(left - best), axis=0)
    shares = tl.zeros((PLACES,), tl.float32)
    numbers = tl.zeros((PLACES,), tl.int32)
    for place in tl.static_range(PER_TOKEN):
        top = tl.max(left, axis=0)
        number = tl.minimum(tl.min(tl.where(left == top, experts, EXPERTS_PADDED), axis=0), EXPERTS - 1)
        shares = tl.where(places == place, tl.exp(top - best), shares)
        numbers = tl.where(places == place, number, numbers)
        left = tl.where(experts == number, float("-inf"), left)
    if NORMED:
        total = tl.sum(shares, axis=0)
    at = token * PER_TOKEN + places
    tl.store(weights + at, shares / total, mask=places < PER_TOKEN)
    tl.store(chosen + at, numbers, mask=places < PER_TOKEN)
