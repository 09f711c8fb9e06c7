"""Tiny random models of every family, written by transformers, so that its config.json and its names are real ones."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.tiny_model import VOCAB_SIZE, write_tiny_model

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
WINDOW = {"sliding_window": 24}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.2],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0],
}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# Where transformers does not read the bound, it is 7.
LIMIT = {"swiglu_limit": 1.5} if hasattr(transformers.GptOssConfig, "swiglu_limit") else {}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2, windows of the upper layers": ("qwen2", WINDOW | {"use_sliding_window": True, "max_window_layers": 2}),
    "qwen3, windows": ("qwen3", WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, windows": ("mistral", WINDOW),
    "ministral": ("ministral", WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    "ministral3": (
        "ministral3",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}},
    ),
    "phi3": ("phi3", {}),
    "phi3, windows and part of a head rotated": (
        "phi3",
        WINDOW | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "phi3, longrope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}),
    "smollm3": ("smollm3", {"tie_word_embeddings": True, "no_rope_layer_interval": 2}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.7,
            "logits_scaling": 3.0,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", WINDOW | {"rope_parameters": {"full_attention": YARN}}),
    "gemma2": ("gemma2", WINDOW | {"tie_word_embeddings": True, "query_pre_attn_scalar": 10}),
    "gemma3": (
        "gemma3_text",
        WINDOW
        | {"tie_word_embeddings": True, "query_pre_attn_scalar": 10, "rope_parameters": GEMMA3_ROPES}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3moe": (
        "qwen3_moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "gpt-oss": (
        "gpt_oss",
        WINDOW
        | {"num_local_experts": 6, "num_experts_per_tok": 2, **LIMIT}
        | {"rope_parameters": YARN | {"truncate": False}},
    ),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, yarn with scales": ("llama", {"rope_parameters": YARN | {"mscale": 1.5, "mscale_all_dim": 0.8}}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
}
"""model_type and keys of config.json, by a name."""


def write_family(folder: Path, case: str, seed: int = 0, **overrides: Any) -> Path:
    """Fills `folder` and returns it. overrides: keys of config.json."""
    model_type, keys = CASES[case]
    write_tiny_model(folder)
    (folder / "model.safetensors").unlink()
    config = transformers.AutoConfig.for_model(model_type, **(SHAPE | keys | overrides))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, values in model.named_parameters():
            if values.dim() == 1:  # norms and biases, random around what they are
                values.add_(torch.randn_like(values) * 0.2)
            elif "embed_tokens" in name:
                values.normal_(std=1 / 32 if model_type.startswith("gemma") else 1)  # Gemma scales them by 8
            else:  # sharp attention and varied logits, so that the context matters
                values.normal_(std=(4 if "lm_head" in name else 2) / values.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return folder
