"""The MLPs among which a layer with experts chooses, and what they compute, in plain torch. Triton kernels are in
engine/kernels."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.fp8_matrix import Weight, dense


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gpt-oss's activation, (up + 1) * gate * sigmoid(alpha * gate) of bounded inputs. Gates and ups take turns."""

    biases: Tensor  # [experts, 2 * width]
    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class Experts:
    gates_ups: Weight  # [experts, 2 * width, hidden]: all gates, then all ups
    downs: Weight  # [experts, hidden, width]
    clamped: ClampedGate | None = None  # None: silu(gate) * up
    down_biases: Tensor | None = None  # [experts, hidden]


class Chosen(NamedTuple):
    """The experts of each token: [num_tokens, per_token]."""

    weights: Tensor  # float32
    numbers: Tensor  # integers


def choose_experts(scores: Tensor, per_token: int, *, normed: bool) -> Chosen:
    """scores: [num_tokens, experts]. normed: whether a token's weights sum to one."""
    weights, numbers = scores.softmax(-1, dtype=torch.float32).topk(per_token, dim=-1)
    return Chosen(weights / weights.sum(-1, keepdim=True) if normed else weights, numbers)


def run_experts(x: Tensor, chosen: Chosen, experts: Experts, *, biased: bool = True) -> Tensor:
    """The weighted sums of what the chosen experts make of `x` [num_tokens, hidden], one expert after the other.
    biased: with `down_biases`, where there are some."""
    added, weights = torch.zeros_like(x), chosen.weights.to(x.dtype)
    for expert in torch.unique(chosen.numbers).tolist():
        tokens, places = torch.where(chosen.numbers == expert)
        activations = _activations(x[tokens] @ dense(experts.gates_ups[expert], x.dtype).t(), expert, experts.clamped)
        outputs = activations @ dense(experts.downs[expert], x.dtype).t()
        if biased and experts.down_biases is not None:
            outputs += experts.down_biases[expert]
        added.index_add_(0, tokens, outputs * weights[tokens, places, None])
    return added


def _activations(gates_ups: Tensor, expert: int, clamped: ClampedGate | None) -> Tensor:
    if clamped is None:
        gate, up = gates_ups.chunk(2, dim=-1)
        return F.silu(gate) * up
    gates_ups, limit = gates_ups + clamped.biases[expert], clamped.limit
    gate, up = gates_ups[:, ::2].clamp(max=limit), gates_ups[:, 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(clamped.alpha * gate)
