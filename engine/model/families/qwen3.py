"""Qwen3 (dense): Llama with an RMS norm of each query and key head before rotation."""

from typing import ClassVar

from engine.model.families.llama import Llama, LlamaLayer
from engine.model.weights import TensorSource


class Qwen3Layer(LlamaLayer):
    def take_others(self, weights: TensorSource, prefix: str) -> None:
        super().take_others(weights, prefix)
        config = self.config
        query = weights.take(f"{prefix}.self_attn.q_norm.weight", config.head_dim)
        key = weights.take(f"{prefix}.self_attn.k_norm.weight", config.head_dim)
        self.norm_heads(weights, query, key)


class Qwen3(Llama):
    layer_type: ClassVar[type[LlamaLayer]] = Qwen3Layer
