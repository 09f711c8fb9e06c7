"""Shapes of the measured models. Because the shape decides the speed, the weights may be random."""

from dataclasses import replace
from typing import Any

from engine.blocks.block_manager import BlockManager
from kvtransfer.slab.layout import SlabLayout
from runtime.checkpoint.model_config import ModelConfig
from runtime.checkpoint.rope_config import Rope

_SMALL = ModelConfig(
    architecture="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_position=40960,
    rms_norm_eps=1e-6,
    rope=Rope(1e6, 128),
    tie_word_embeddings=True,
    dtype="bfloat16",
)

SHAPES = {
    "0.6b": _SMALL,
    "8b": replace(
        _SMALL, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, tie_word_embeddings=False
    ),
    "smollm2": replace(
        _SMALL,
        architecture="llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position=8192,
        rms_norm_eps=1e-5,
        rope=Rope(1e5, 64),
    ),
    "30b-a3b": replace(
        _SMALL,
        architecture="qwen3moe",
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        tie_word_embeddings=False,
        num_experts=128,
        experts_per_token=8,
        expert_size=768,
        norms_expert_weights=True,
    ),
    "gpt-oss-20b": replace(
        _SMALL,
        architecture="gpt-oss",
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_layers=24,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        rope=Rope(1.5e5, 64),
        tie_word_embeddings=False,
        windows=(128, 0) * 12,
        num_experts=32,
        experts_per_token=4,
        expert_size=2880,
        norms_expert_weights=True,
    ),
    "gemma3-4b": replace(
        _SMALL,
        architecture="gemma3",
        vocab_size=262144,
        hidden_size=2560,
        intermediate_size=10240,
        num_layers=34,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        rope=Rope(1e6, 256),
        local_rope=Rope(1e4, 256),
        windows=((1024,) * 5 + (0,)) * 5 + (1024,) * 4,
        embedding_scale=2560**0.5,
    ),
}
"""Qwen3-0.6B, Qwen3-8B, SmolLM2-135M, Qwen3-30B-A3B, gpt-oss-20b (with the rope of its first 4,096 positions) and
Gemma-3-4B (without the scaling of its rope)"""

PLAIN = [name for name, shape in SHAPES.items() if not shape.windows]  # all layers see everything


def blocks_of(layout: SlabLayout, model: ModelConfig) -> BlockManager:
    """The blocks of a slab on the device alone."""
    return BlockManager(
        layout.num_blocks,
        layout.block_size,
        window=model.widest_window,
        num_window_blocks=layout.num_window_blocks,
    )


def sizes_of(shape: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that all families have."""
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "torch_dtype": "bfloat16",
    }
