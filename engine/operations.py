"""What a model does around attention, behind one interface: plain torch here, fused Triton kernels in
engine/triton_operations.py. The runner's builder chooses.

The residual stream is a pair: `hidden`, and a `delta` that is still to be added to it, or None when that is done.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Operations(Protocol):
    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden], memory of its own."""
        ...

    def norm_linear(
        self, hidden: Tensor, delta: Tensor | None, norm: Tensor, eps: float, weight: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """hidden += delta, in place; the product of its RMS norm with `weight` [n, hidden], in `out` if given."""
        ...

    def add_linear(self, hidden: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
        """x @ weight.T, which belongs to `hidden`: the delta, or None when it was added at once."""
        ...

    def add_silu_linear(self, hidden: Tensor, gate_up: Tensor, weight: Tensor) -> Tensor | None:
        """The same for silu of the first half of `gate_up` times the second."""
        ...


class TorchOperations:
    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(token_ids, table)

    def norm_linear(
        self, hidden: Tensor, delta: Tensor | None, norm: Tensor, eps: float, weight: Tensor, out: Tensor | None = None
    ) -> Tensor:
        if delta is not None:
            hidden += delta
        return torch.mm(F.rms_norm(hidden, norm.shape, norm, eps), weight.t(), out=out)

    def add_linear(self, hidden: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
        return F.linear(x, weight)

    def add_silu_linear(self, hidden: Tensor, gate_up: Tensor, weight: Tensor) -> Tensor | None:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, weight)
