"""Llama (Touvron et al.) for a paged KV cache. The tokens of all sequences of a step lie flat, [num_tokens, hidden].

The model knows no sequences and no blocks: `attend` stores a layer's keys and values and attends to the cache.
"""

from collections.abc import Callable
from typing import ClassVar

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
        hidden, mlp = config.hidden_size, config.intermediate_size
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.config = config
        self.operations = operations
        self.index = index
        self.head_norms: HeadNorms | None = None
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

    def after_attention(self, hidden: Tensor, mixed: Tensor) -> None:
        """mixed: [num_tokens, heads * head_dim]."""
        config, operations = self.config, self.operations
        stream = operations.pieces(hidden)
        for rows, values in zip(stream, operations.pieces(mixed), strict=True):
            operations.add_linear(rows, values, self.output)
        for rows in stream:
            activations = operations.norm_gated_linear(rows, self.mlp_norm, config.rms_norm_eps, self.gate_up)
            operations.add_linear(rows, activations, self.down)


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
        self.norm = weights.take("model.norm.weight", config.hidden_size)
        if config.tie_word_embeddings:
            self.head = self.embeddings[vocabulary.start : vocabulary.stop]
            weights.finish(ignored=["lm_head.weight"])
        else:
            self.head = weights.take("lm_head.weight", len(vocabulary), config.hidden_size)
            weights.finish()

    def forward(self, token_ids: Tensor, attend: Attend) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden]"""
        hidden = self.operations.embed(token_ids, self.embeddings)
        for layer in self.layers:
            layer.forward(hidden, attend)
        self.operations.settle(hidden)
        return hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, hidden] -> [rows, tokens of `vocabulary`], in `out` if given."""
        return self.operations.norm_linear(hidden, self.norm, self.config.rms_norm_eps, self.head, out)
