"""Llama (Touvron et al.) for a paged KV cache. The tokens of all sequences of a step lie flat, [num_tokens, hidden].

The model knows no sequences and no blocks: `attend` stores a layer's keys and values and attends to the cache.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from engine.model.attention import HeadNorms
from engine.model.operations import Operations
from engine.model.weights import TensorSource
from runtime.checkpoint.model_config import ModelConfig

Attend = Callable[[int, Tensor, HeadNorms | None], Tensor]
"""(layer, projected queries, keys and values, norms of heads) -> mixed values; see
engine.model.attention.StepAttention."""


class LlamaLayer:
    def __init__(self, config: ModelConfig, weights: TensorSource, operations: Operations, index: int) -> None:
        prefix = f"model.layers.{index}"
        hidden = config.hidden_size
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.config = config
        self.operations = operations
        self.index = index
        self.head_norms: HeadNorms | None = None
        self.sinks: Tensor | None = None  # [heads]: a score that each query has beside those of the keys, of no value
        self.query_scale = config.query_scale  # of projected queries
        self.projected = {"q_proj": query, "k_proj": kv, "v_proj": kv}  # a token's numbers, in order
        self.qkv = weights.take_matrices(
            {f"{prefix}.self_attn.{name}.weight": (size, hidden) for name, size in self.projected.items()}
        )
        self.output = weights.take_matrix(f"{prefix}.self_attn.o_proj.weight", hidden, query)
        self.take_mlp(weights, f"{prefix}.mlp", hidden, config.intermediate_size)
        self.take_others(weights, prefix)

    def take_mlp(self, weights: TensorSource, prefix: str, hidden: int, width: int) -> None:
        self.gate_up = weights.take_matrices(
            {f"{prefix}.gate_proj.weight": (width, hidden), f"{prefix}.up_proj.weight": (width, hidden)}
        )
        self.down = weights.take_matrix(f"{prefix}.down_proj.weight", hidden, width)

    def take_others(self, weights: TensorSource, prefix: str) -> None:
        """What a family has beside the projections."""
        self.input_norm = self.take_norm(weights, f"{prefix}.input_layernorm.weight", self.config.hidden_size)
        self.mlp_norm = self.take_norm(weights, f"{prefix}.post_attention_layernorm.weight", self.config.hidden_size)

    def norm_heads(self, weights: TensorSource, query: Tensor, key: Tensor) -> None:
        """Normalises single heads: weights [head_dim]."""
        config = self.config
        each = weights.derived(
            lambda: torch.cat((query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)))
        )
        self.head_norms = HeadNorms(query, key, each, config.rms_norm_eps)

    @staticmethod
    def take_norm(weights: TensorSource, name: str, size: int) -> Tensor:
        """Takes the weights [size] of an RMS norm."""
        return weights.take(name, size)

    def forward(self, hidden: Tensor, attend: Attend) -> None:
        """Adds the layer's result to `hidden` [num_tokens, hidden], the residual stream, in place."""
        qkv = hidden.new_empty(len(hidden), len(self.qkv))
        self.before_attention(hidden, qkv)
        mixed = attend(self.index, qkv.view(len(hidden), -1, self.config.head_dim), self.head_norms)
        self.after_attention(hidden, mixed.flatten(1))

    def before_attention(self, hidden: Tensor, qkv: Tensor) -> None:
        """Writes projected queries, keys and values [num_tokens, (heads + 2 * kv_heads) * head_dim]."""
        config, operations = self.config, self.operations
        for rows, to in zip(operations.pieces(hidden), operations.pieces(qkv), strict=True):
            operations.norm_linear(rows, self.input_norm, config.rms_norm_eps, self.qkv, to)
        if self.query_scale != 1.0:
            qkv[:, : self.projected["q_proj"]].mul_(self.query_scale)

    def after_attention(self, hidden: Tensor, mixed: Tensor) -> None:
        """mixed: [num_tokens, heads * head_dim]."""
        operations = self.operations
        stream = operations.pieces(hidden)
        for rows, values in zip(stream, operations.pieces(mixed), strict=True):
            operations.add_linear(rows, self.scaled(values), self.output)
        for rows in stream:
            self.add_mlp(rows)

    def add_mlp(self, rows: Tensor) -> None:
        """rows: of the residual stream."""
        operations = self.operations
        activations = operations.norm_gated_linear(rows, self.mlp_norm, self.config.rms_norm_eps, self.gate_up)
        operations.add_linear(rows, self.scaled(activations), self.down)

    def scaled(self, values: Tensor) -> Tensor:
        """Scales what the layer adds to the residual stream."""
        scale = self.config.residual_scale
        return values if scale == 1.0 else values * scale


class Llama:
    """The decoder. `forward` returns hidden states; `logits` turns chosen rows of them into scores of the
    vocabulary."""

    layer_type: ClassVar[type[LlamaLayer]] = LlamaLayer

    def __init__(
        self, config: ModelConfig, weights: TensorSource, operations: Operations, vocabulary: range | None = None
    ) -> None:
        """`vocabulary`: the tokens whose logits are computed here; None: all. Raises ModelError when the weights do not
        fit."""
        vocabulary = vocabulary or range(config.vocab_size)
        self.config = config
        self.vocabulary = vocabulary
        self.operations = operations
        self.embeddings = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [self.layer_type(config, weights, operations, index) for index in range(config.num_layers)]
        self.norm = self.layer_type.take_norm(weights, "model.norm.weight", config.hidden_size)
        self._embedding_scale = float(torch.tensor(config.embedding_scale).to(self.embeddings.dtype))
        if config.tie_word_embeddings:
            self.head = self.embeddings[vocabulary.start : vocabulary.stop]
            weights.finish(ignored=["lm_head.weight"])
        else:
            self.head = weights.take("lm_head.weight", len(vocabulary), config.hidden_size)
            weights.finish()

    def embed(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden] in new memory: the beginning of the residual stream."""
        hidden = self.operations.embed(token_ids, self.embeddings)
        return hidden if self._embedding_scale == 1.0 else hidden.mul_(self._embedding_scale)

    def forward(self, token_ids: Tensor, attend: Attend) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden]"""
        hidden = self.embed(token_ids)
        for layer in self.layers:
            layer.forward(hidden, attend)
        self.operations.settle(hidden)
        return hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, hidden] -> [rows, tokens of `vocabulary`], in `out` if given."""
        config = self.config
        logits = self.operations.norm_linear(hidden, self.norm, config.rms_norm_eps, self.head, out)
        if config.logit_scale != 1.0:
            logits.mul_(config.logit_scale)
        if config.logit_softcap:
            logits.div_(config.logit_softcap).tanh_().mul_(config.logit_softcap)
        return logits
