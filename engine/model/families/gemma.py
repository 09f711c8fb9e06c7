"""Gemma 2 and the text part of Gemma 3 (Google): norms before and after, whose weights are offsets from 1; gelu for
silu; scaled embeddings and queries. Gemma 2 has soft caps, Gemma 3 norms of heads. Some layers have a window."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from engine.model.families.llama import Llama, LlamaLayer
from engine.model.weights import TensorSource


class Gemma2Layer(LlamaLayer):
    @staticmethod
    def take_norm(weights: TensorSource, name: str, size: int) -> Tensor:
        """float32, because an offset from 1 has fewer digits in 16 bits."""
        offset = weights.take(name, size)
        return weights.derived(lambda: offset.float() + 1.0)

    def take_others(self, weights: TensorSource, prefix: str) -> None:
        super().take_others(weights, prefix)
        hidden = self.config.hidden_size
        self.attention_norm = self.mlp_norm
        self.mlp_norm = self.take_norm(weights, f"{prefix}.pre_feedforward_layernorm.weight", hidden)
        self.added_norm = self.take_norm(weights, f"{prefix}.post_feedforward_layernorm.weight", hidden)

    def after_attention(self, hidden: Tensor, mixed: Tensor) -> None:
        eps, operations = self.config.rms_norm_eps, self.operations
        operations.add_normed_linear(hidden, mixed, self.output, self.attention_norm, eps)
        gate, up = operations.norm_linear(hidden, self.mlp_norm, eps, self.gate_up).chunk(2, dim=-1)
        activations = F.gelu(gate, approximate="tanh") * up
        operations.add_normed_linear(hidden, activations, self.down, self.added_norm, eps)


class Gemma3Layer(Gemma2Layer):
    def take_others(self, weights: TensorSource, prefix: str) -> None:
        super().take_others(weights, prefix)
        config = self.config
        scale, self.query_scale = self.query_scale, 1.0  # behind a norm it is the norm's
        offset = self.take_norm(weights, f"{prefix}.self_attn.q_norm.weight", config.head_dim)
        query = weights.derived(lambda: offset * scale)
        key = self.take_norm(weights, f"{prefix}.self_attn.k_norm.weight", config.head_dim)
        self.norm_heads(weights, query, key)


class Gemma2(Llama):
    layer_type: ClassVar[type[LlamaLayer]] = Gemma2Layer


class Gemma3(Llama):
    layer_type: ClassVar[type[LlamaLayer]] = Gemma3Layer
