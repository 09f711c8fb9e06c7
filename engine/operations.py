"""What a model does around attention, behind one interface: plain torch here, fused Triton kernels in
engine/triton_operations.py. The runner's builder chooses.

`hidden` is the residual stream, [num_tokens, hidden]; linear weights are [n, k].
"""

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

    def norm_linear(
        self, hidden: Tensor, norm: Tensor, eps: float, weight: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """The product of the RMS norm of `hidden` with `weight`, in `out` if given."""
        ...

    def norm_gated_linear(self, hidden: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        """silu(gate) * up [num_tokens, n] of the halves of the RMS norm's product with `gate_up` [2 * n, k]."""
        ...

    def add_linear(self, hidden: Tensor, x: Tensor, weight: Tensor) -> None:
        """hidden += x @ weight.T, in place."""
        ...


class TorchOperations:
    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(token_ids, table)

    def linear(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mm(x, weight.t(), out=out)

    def norm_linear(
        self, hidden: Tensor, norm: Tensor, eps: float, weight: Tensor, out: Tensor | None = None
    ) -> Tensor:
        return torch.mm(F.rms_norm(hidden, norm.shape, norm, eps), weight.t(), out=out)

    def norm_gated_linear(self, hidden: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        gate, up = self.norm_linear(hidden, norm, eps, gate_up).chunk(2, dim=-1)
        return F.silu(gate) * up

    def add_linear(self, hidden: Tensor, x: Tensor, weight: Tensor) -> None:
        hidden.addmm_(x, weight.t())
