"""Llama (Touvron et al.) for a paged KV cache: tokens of all sequences of a step lie flat, [num_tokens, hidden].

The model knows neither sequences nor blocks: `attend` stores the keys and values of a layer and attends to the cache.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model_config import ModelConfig
from engine.rope import RotaryEmbedding, rotate
from engine.weights import Weights

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries, keys, values) -> mixed values; see engine.attention.StepAttention."""


class LlamaLayer:
    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        prefix = f"model.layers.{index}"
        hidden, mlp = config.hidden_size, config.intermediate_size
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.config = config
        self.index = index
        self.input_norm = weights.take(f"{prefix}.input_layernorm.weight", hidden)
        self.qkv = weights.take_fused(
            {
                f"{prefix}.self_attn.q_proj.weight": (query, hidden),
                f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
                f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            }
        )
        self.output = weights.take(f"{prefix}.self_attn.o_proj.weight", hidden, query)
        self.mlp_norm = weights.take(f"{prefix}.post_attention_layernorm.weight", hidden)
        self.gate_up = weights.take_fused(
            {f"{prefix}.mlp.gate_proj.weight": (mlp, hidden), f"{prefix}.mlp.up_proj.weight": (mlp, hidden)}
        )
        self.down = weights.take(f"{prefix}.mlp.down_proj.weight", hidden, mlp)

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[num_tokens, hidden] in and out."""
        config = self.config
        qkv = F.linear(rms_norm(hidden, self.input_norm, config), self.qkv).view(len(hidden), -1, config.head_dim)
        queries_keys, values = qkv[:, : -config.num_kv_heads], qkv[:, -config.num_kv_heads :]
        queries_keys = rotate(self.normalised(queries_keys), *angles)  # at once: half as many calls
        queries, keys = queries_keys[:, : config.num_heads], queries_keys[:, config.num_heads :]
        hidden = hidden + F.linear(attend(self.index, queries, keys, values).flatten(1), self.output)
        gate, up = F.linear(rms_norm(hidden, self.mlp_norm, config), self.gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, self.down)

    def normalised(self, queries_keys: Tensor) -> Tensor:
        """What an architecture does to its heads [num_tokens, heads + kv_heads, head_dim] before they are rotated."""
        return queries_keys


class Llama:
    """The decoder. `forward` gives hidden states, `logits` turns chosen rows of them into scores of the vocabulary."""

    layer_type: ClassVar[type[LlamaLayer]] = LlamaLayer

    def __init__(self, config: ModelConfig, weights: Weights, device: torch.device) -> None:
        """Takes its tensors from `weights`. Raises ModelError when they do not fit."""
        self.config = config
        self.rotary = RotaryEmbedding(config, device)
        self.embeddings = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [self.layer_type(config, weights, index) for index in range(config.num_layers)]
        self.norm = weights.take("model.norm.weight", config.hidden_size)
        if config.tie_word_embeddings:
            self.head = self.embeddings
            weights.finish(ignored=["lm_head.weight"])
        else:
            self.head = weights.take("lm_head.weight", config.vocab_size, config.hidden_size)
            weights.finish()

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [num_tokens, hidden] of [num_tokens] tokens at [num_tokens] positions."""
        hidden = F.embedding(token_ids, self.embeddings)
        angles = self.rotary.angles(positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer.forward(hidden, angles, attend)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab]"""
        return F.linear(rms_norm(hidden, self.norm, self.config), self.head)


def rms_norm(values: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    return F.rms_norm(values, weight.shape, weight, config.rms_norm_eps)
