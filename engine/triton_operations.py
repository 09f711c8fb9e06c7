"""The model's elementwise work as fused Triton kernels: on a GPU, and in Triton's interpreter in tests."""

from torch import Tensor

from engine.kernels.embedding import embed
from engine.kernels.rms_norm import add_rms_norm
from engine.kernels.silu_mul import silu_mul


class TritonOperations:
    """Implements `engine.operations.Operations`. `sampled`: int32, the tokens that the step before sampled, to which
    negative token ids refer."""

    def __init__(self, sampled: Tensor) -> None:
        self._sampled = sampled

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return embed(token_ids, self._sampled, table)

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(hidden, delta, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)
