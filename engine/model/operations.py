"""What a model does around attention, behind one interface: plain torch here, fused Triton kernels in
engine/cuda/triton_operations.py. The runner's builder chooses.

`hidden` is the residual stream, [num_tokens, hidden]; linear weights are [n, k].
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Operations(Protocol):
    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden], memory of its own."""
        ...

    def linear(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """x @ weight.T, in `out` if given."""
        ...

    def norm(self, hidden: Tensor, weights: Tensor, eps: float, parts: tuple[Tensor, ...] = ()) -> Tensor:
        """The RMS norm of `hidden`, which grows by the sum of `parts` before, in place; two at most."""
        ...

    def norm_linear(
        self, hidden: Tensor, norm: Tensor, eps: float, weight: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """The product of the RMS norm of `hidden` with `weight`, in `out` if given."""
        ...

    def gated_linear(self, x: Tensor, gate_up: Tensor) -> Tensor:
        """silu(gate) * up [num_tokens, n] of the halves of x's product with `gate_up` [2 * n, k]."""
        ...

    def norm_gated_linear(self, hidden: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        """The same of the RMS norm of `hidden`."""
        ...

    def add_linear(self, hidden: Tensor, x: Tensor, weight: Tensor) -> None:
        """hidden += x @ weight.T, in place: for who reads `hidden` through the other operations. For all others only
        when it was settled."""
        ...

    def settle(self, hidden: Tensor) -> None:
        """All that was added to `hidden` is in it."""
        ...

    def pieces(self, rows: Tensor) -> Sequence[Tensor]:
        """Rows [num_tokens, ...] in the pieces that a layer should take one after the other, where it can."""
        ...


class TorchOperations:
    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(token_ids, table)

    def linear(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mm(x, weight.t(), out=out)

    def norm(self, hidden: Tensor, weights: Tensor, eps: float, parts: tuple[Tensor, ...] = ()) -> Tensor:
        for part in parts:
            hidden.add_(part)
        return F.rms_norm(hidden, weights.shape, weights, eps)

    def norm_linear(
        self, hidden: Tensor, norm: Tensor, eps: float, weight: Tensor, out: Tensor | None = None
    ) -> Tensor:
        return torch.mm(self.norm(hidden, norm, eps), weight.t(), out=out)

    def gated_linear(self, x: Tensor, gate_up: Tensor) -> Tensor:
        gate, up = torch.mm(x, gate_up.t()).chunk(2, dim=-1)
        return F.silu(gate) * up

    def norm_gated_linear(self, hidden: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        return self.gated_linear(self.norm(hidden, norm, eps), gate_up)

    def add_linear(self, hidden: Tensor, x: Tensor, weight: Tensor) -> None:
        hidden.addmm_(x, weight.t())

    def settle(self, hidden: Tensor) -> None:
        """It is."""

    def pieces(self, rows: Tensor) -> Sequence[Tensor]:
        return (rows,)
