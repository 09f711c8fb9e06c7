"""Qwen3 (dense): Llama whose query and key heads are normalised, each by itself, before they are rotated."""

from typing import ClassVar

import torch
from torch import Tensor

from engine.model_config import ModelConfig
from engine.models.llama import Llama, LlamaLayer
from engine.weights import Weights


class Qwen3Layer(LlamaLayer):
    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        super().__init__(config, weights, index)
        query_norm = weights.take(f"model.layers.{index}.self_attn.q_norm.weight", config.head_dim)
        key_norm = weights.take(f"model.layers.{index}.self_attn.k_norm.weight", config.head_dim)
        self.head_norm = torch.cat(  # [heads + kv_heads, head_dim]: one multiplication for queries and keys
            (query_norm.expand(config.num_heads, -1), key_norm.expand(config.num_kv_heads, -1))
        )

    def normalised(self, queries_keys: Tensor) -> Tensor:
        return torch.rms_norm(queries_keys, [self.config.head_dim], eps=self.config.rms_norm_eps) * self.head_norm


class Qwen3(Llama):
    layer_type: ClassVar[type[LlamaLayer]] = Qwen3Layer
