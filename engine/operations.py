"""What a model does between matrix products and attention, behind one interface: plain torch here, fused Triton kernels
in engine/triton_operations.py. The runner's builder chooses."""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class Operations(Protocol):
    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden], memory of its own."""
        ...

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """hidden += delta, in place; the RMS norm of the sum. All [num_tokens, hidden]."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[num_tokens, 2 * size] -> silu of the first half times the second."""
        ...


class TorchOperations:
    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return F.embedding(token_ids, table)

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if delta is not None:
            hidden += delta
        return F.rms_norm(hidden, weight.shape, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
