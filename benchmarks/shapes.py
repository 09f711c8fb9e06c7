"""Shapes of the measured models. Because the shape decides the speed, the weights may be random."""

from dataclasses import replace

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
}
"""Qwen3-0.6B, Qwen3-8B and SmolLM2-135M"""
