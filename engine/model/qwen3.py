"""Qwen3 (dense): Llama with an RMS norm of each query and key head before rotation."""

from typing import ClassVar

import torch

from engine.model.attention import HeadNorms
from engine.model.llama import Llama, LlamaLayer
from engine.model.operations import Operations
from engine.model.weights import TensorSource
from runtime.checkpoint.model_config import ModelConfig


class Qwen3Layer(LlamaLayer):
    def __init__(self, config: ModelConfig, weights: TensorSource, operations: Operations, index: int) -> None:
        super().__init__(config, weights, operations, index)
        query = weights.take(f"model.layers.{index}.self_attn.q_norm.weight", config.head_dim)
        key = weights.take(f"model.layers.{index}.self_attn.k_norm.weight", config.head_dim)
        each = weights.derived(
            lambda: torch.cat((query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)))
        )
        self.head_norms = HeadNorms(query, key, each, config.rms_norm_eps)


class Qwen3(Llama):
    layer_type: ClassVar[type[LlamaLayer]] = Qwen3Layer
