"""The model's work around attention as fused Triton kernels: on a GPU, and in Triton's interpreter in tests.

Up to MAX_ROWS rows the matrix products are Triton's too, with all that surrounds them inside; beyond, cuBLAS is better.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.embedding import embed
from engine.kernels.rms_norm import add_rms_norm
from engine.kernels.silu_mul import silu_mul
from engine.kernels.small_linear import MAX_ROWS, small_linear


class TritonOperations:
    """Implements `engine.operations.Operations`. `sampled`: int32, the tokens that the step before sampled, to which
    negative token ids refer."""

    def __init__(self, sampled: Tensor) -> None:
        self._sampled = sampled

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return embed(token_ids, self._sampled, table)

    def norm_linear(
        self, hidden: Tensor, delta: Tensor | None, norm: Tensor, eps: float, weight: Tensor, out: Tensor | None = None
    ) -> Tensor:
        if len(hidden) <= MAX_ROWS and delta is None:
            return small_linear(hidden, weight, norm=norm, eps=eps, out=out)
        return torch.mm(add_rms_norm(hidden, delta, norm, eps), weight.t(), out=out)

    def add_linear(self, hidden: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
        if len(x) <= MAX_ROWS:
            small_linear(x, weight, add_to=hidden)
            return None
        return F.linear(x, weight)

    def add_silu_linear(self, hidden: Tensor, gate_up: Tensor, weight: Tensor) -> Tensor | None:
        if len(gate_up) <= MAX_ROWS:
            small_linear(gate_up, weight, silu=True, add_to=hidden)
            return None
        return F.linear(silu_mul(gate_up), weight)
