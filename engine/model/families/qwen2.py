"""Qwen2 and Qwen2.5 (dense): Llama with biases of queries, keys and values."""

from typing import ClassVar

from torch import Tensor

from engine.model.families.llama import Llama, LlamaLayer
from engine.model.weights import TensorSource


class Qwen2Layer(LlamaLayer):
    def take_others(self, weights: TensorSource, prefix: str) -> None:
        super().take_others(weights, prefix)
        self.bias = weights.take_fused(
            {f"{prefix}.self_attn.{name}.bias": (size,) for name, size in self.projected.items()}
        )

    def before_attention(self, hidden: Tensor, qkv: Tensor) -> None:
        super().before_attention(hidden, qkv)
        qkv.add_(self.bias)


class Qwen2(Llama):
    layer_type: ClassVar[type[LlamaLayer]] = Qwen2Layer
