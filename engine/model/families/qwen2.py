"""Qwen2 and Qwen2.5 (dense): Llama with biases of queries, keys and values."""

from typing import ClassVar

from torch import Tensor

from engine.model.families.llama import Llama, LlamaLayer
from engine.model.weights import TensorSource


class Qwen2Layer(LlamaLayer):
    def take_others(self, weights: TensorSource, prefix: str) -> None:
        super().take_others(weights, prefix)
        config = self.config
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.bias = weights.take_fused(
            {
                f"{prefix}.self_attn.q_proj.bias": (query,),
                f"{prefix}.self_attn.k_proj.bias": (kv,),
                f"{prefix}.self_attn.v_proj.bias": (kv,),
            }
        )

    def before_attention(self, hidden: Tensor, qkv: Tensor) -> None:
        super().before_attention(hidden, qkv)
        qkv.add_(self.bias)


class Qwen2(Llama):
    layer_type: ClassVar[type[LlamaLayer]] = Qwen2Layer
