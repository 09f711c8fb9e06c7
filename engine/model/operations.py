"""The operations of a model around attention: their interface, and plain torch. Fused Triton kernels are in
engine/cuda/triton_operations.py.

`hidden` is the residual stream, [num_tokens, hidden]; linear weights are [n, k]. With weights in 8 bits
plain torch computes what numbers times scales would give.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.experts import Chosen, Experts, choose_experts, run_experts
from engine.model.fp8_matrix import Weight, dense


class Operations(Protocol):
    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden] in new memory."""

    def linear(self, x: Tensor, weight: Weight, out: Tensor | None = None) -> Tensor:
        """x @ weight.T, in `out` if given."""

    def norm(self, hidden: Tensor, weights: Tensor, eps: float, parts: tuple[Tensor, ...] = ()) -> Tensor:
        """Adds `parts`, two at most, to `hidden` in place, and returns its RMS norm."""

    def norm_linear(
        self, hidden: Tensor, norm: Tensor, eps: float, weight: Weight, out: Tensor | None = None
    ) -> Tensor:
        """linear(norm(hidden), weight), in `out` if given."""

    def gated_linear(self, x: Tensor, gate_up: Weight) -> Tensor:
        """silu(gate) * up [num_tokens, n], where gate and up are the halves of x @ gate_up.T, `gate_up` [2 * n, k]."""

    def norm_gated_linear(self, hidden: Tensor, norm: Tensor, eps: float, gate_up: Weight) -> Tensor:
        """gated_linear(norm(hidden), gate_up)"""

    def add_linear(self, hidden: Tensor, x: Tensor, weight: Weight) -> None:
        """hidden += x @ weight.T. The other operations see the sum at once, everybody else after `settle`."""

    def add_normed_linear(self, hidden: Tensor, x: Tensor, weight: Weight, norm: Tensor, eps: float) -> None:
        """hidden += norm(x @ weight.T)"""

    def shared_norm(self, x: Tensor, weights: Tensor, eps: float) -> Tensor:
        """The RMS norm of rows whose columns are divided among the ranks: `x` and `weights` are this rank's."""

    def choose_experts(self, scores: Tensor, per_token: int, *, normed: bool) -> Chosen:
        """See engine.model.experts.choose_experts."""

    def run_experts(self, x: Tensor, chosen: Chosen, experts: Experts, *, biased: bool, out: Tensor | None) -> Tensor:
        """See engine.model.experts.run_experts; in `out` if given. chosen: what `choose_experts` returned."""

    def add_experts(self, hidden: Tensor, x: Tensor, chosen: Chosen, experts: Experts) -> None:
        """hidden += run_experts(x, ...), seen as what `add_linear` adds."""

    def settle(self, hidden: Tensor) -> None:
        """Completes the additions to `hidden`."""

    def pieces(self, rows: Tensor) -> Sequence[Tensor]:
        """The pieces of `rows` [num_tokens, ...] that a layer should compute one after the other where it can."""


class TorchOperations:
    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(token_ids, table)

    def linear(self, x: Tensor, weight: Weight, out: Tensor | None = None) -> Tensor:
        return torch.mm(x, dense(weight, x.dtype).t(), out=out)

    def norm(self, hidden: Tensor, weights: Tensor, eps: float, parts: tuple[Tensor, ...] = ()) -> Tensor:
        for part in parts:
            hidden.add_(part)
        return F.rms_norm(hidden, weights.shape, weights, eps).to(hidden.dtype)

    def norm_linear(
        self, hidden: Tensor, norm: Tensor, eps: float, weight: Weight, out: Tensor | None = None
    ) -> Tensor:
        return self.linear(self.norm(hidden, norm, eps), weight, out)

    def gated_linear(self, x: Tensor, gate_up: Weight) -> Tensor:
        gate, up = self.linear(x, gate_up).chunk(2, dim=-1)
        return F.silu(gate) * up

    def norm_gated_linear(self, hidden: Tensor, norm: Tensor, eps: float, gate_up: Weight) -> Tensor:
        return self.gated_linear(self.norm(hidden, norm, eps), gate_up)

    def add_linear(self, hidden: Tensor, x: Tensor, weight: Weight) -> None:
        hidden.addmm_(x, dense(weight, x.dtype).t())

    def add_normed_linear(self, hidden: Tensor, x: Tensor, weight: Weight, norm: Tensor, eps: float) -> None:
        hidden.add_(self.norm(self.linear(x, weight), norm, eps))

    def shared_norm(self, x: Tensor, weights: Tensor, eps: float) -> Tensor:
        return self.norm(x, weights, eps)

    def choose_experts(self, scores: Tensor, per_token: int, *, normed: bool) -> Chosen:
        return choose_experts(scores, per_token, normed=normed)

    def run_experts(self, x: Tensor, chosen: Chosen, experts: Experts, *, biased: bool, out: Tensor | None) -> Tensor:
        result = run_experts(x, chosen, experts, biased=biased)
        return result if out is None else out.copy_(result)

    def add_experts(self, hidden: Tensor, x: Tensor, chosen: Chosen, experts: Experts) -> None:
        hidden.add_(run_experts(x, chosen, experts))

    def settle(self, hidden: Tensor) -> None:
        """Additions are complete at once."""

    def pieces(self, rows: Tensor) -> Sequence[Tensor]:
        return (rows,)
