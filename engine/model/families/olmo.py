"""OLMo 2 and 3 (Ai2): what a layer adds is normalised, its input is not; all queries of a token are normalised
together, and so are its keys. Some layers of OLMo 3 have a window."""

from typing import ClassVar

import torch
from torch import Tensor

from engine.model.families.llama import Llama, LlamaLayer
from engine.model.weights import TensorSource


class OlmoLayer(LlamaLayer):
    def take_others(self, weights: TensorSource, prefix: str) -> None:
        hidden = self.config.hidden_size
        self.query_norm = weights.take(f"{prefix}.self_attn.q_norm.weight", self.projected["q_proj"])
        self.key_norm = weights.take(f"{prefix}.self_attn.k_norm.weight", self.projected["k_proj"])
        self.attention_norm = weights.take(f"{prefix}.post_attention_layernorm.weight", hidden)
        self.mlp_norm = weights.take(f"{prefix}.post_feedforward_layernorm.weight", hidden)

    def before_attention(self, hidden: Tensor, qkv: Tensor) -> None:
        eps, operations = self.config.rms_norm_eps, self.operations
        operations.linear(hidden, self.qkv, qkv)
        queries, keys, _ = torch.split(qkv, list(self.projected.values()), dim=-1)
        queries.copy_(operations.shared_norm(queries, self.query_norm, eps))
        keys.copy_(operations.shared_norm(keys, self.key_norm, eps))

    def after_attention(self, hidden: Tensor, mixed: Tensor) -> None:
        eps, operations = self.config.rms_norm_eps, self.operations
        operations.add_normed_linear(hidden, mixed, self.output, self.attention_norm, eps)
        activations = operations.gated_linear(hidden, self.gate_up)
        operations.add_normed_linear(hidden, activations, self.down, self.mlp_norm, eps)


class Olmo(Llama):
    layer_type: ClassVar[type[LlamaLayer]] = OlmoLayer
