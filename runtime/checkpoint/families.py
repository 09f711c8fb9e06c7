"""The model families that are served: one row each, with all that distinguishes their checkpoints. No torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    hf_class: str  # in `architectures` of config.json
    default_head_dim: int | None = None  # where config.json says none; None: hidden size / attention heads
    has_biases: bool = False  # of queries, keys and values
    has_output_bias: bool = False  # behind attention, too: config.json says attention_bias
    has_sinks: bool = False  # of attention heads: see LlamaLayer
    has_head_norms: bool = False  # query and key heads are normalised: tensors q_norm and k_norm
    has_whole_norms: bool = False  # all queries of a token are normalised together, and all its keys
    windows: Literal["", "always", "if used"] = ""  # whether `sliding_window` counts; used: by `use_sliding_window`
    full_every: int = 0  # which layers see all where config.json lists no `layer_types`; 0: none
    has_local_rope: bool = False  # layers with a window are rotated by another rope
    unrotated_every: int = 0  # which layers are not rotated where config.json lists none; 0: all are
    scales: Literal["", "granite", "gemma"] = ""  # whose keys of config.json scale activations
    experts: Literal["", "mixtral", "qwen3"] = ""  # whose keys of config.json describe them
    is_fused: bool = False  # tensors qkv_proj and gate_up_proj
    is_tied: bool = False  # where config.json does not say it
    activation: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    gguf: Literal["", "halves", "pairs"] = ""  # whether .gguf files are read, and which dimensions llama.cpp rotates:
    # (i, i + head_dim / 2), or neighbours (2i, 2i + 1), for which it has ordered the rows of q and k


FAMILIES = {
    "llama": Family(hf_class="LlamaForCausalLM", gguf="pairs"),
    "qwen2": Family(hf_class="Qwen2ForCausalLM", has_biases=True, windows="if used", gguf="halves"),
    "qwen3": Family(
        hf_class="Qwen3ForCausalLM", default_head_dim=128, has_head_norms=True, windows="if used", gguf="halves"
    ),
    "mistral": Family(hf_class="MistralForCausalLM", windows="always"),
    "ministral": Family(hf_class="MinistralForCausalLM", windows="always"),
    "mistral3": Family(hf_class="Ministral3ForCausalLM", windows="always"),
    "phi3": Family(hf_class="Phi3ForCausalLM", windows="always", is_fused=True, gguf="halves"),
    "smollm3": Family(hf_class="SmolLM3ForCausalLM", unrotated_every=4, is_tied=True),
    "granite": Family(hf_class="GraniteForCausalLM", scales="granite"),
    "olmo2": Family(hf_class="Olmo2ForCausalLM", has_whole_norms=True),
    "olmo3": Family(
        hf_class="Olmo3ForCausalLM", has_whole_norms=True, windows="always", full_every=4, has_local_rope=True
    ),
    "gemma2": Family(
        hf_class="Gemma2ForCausalLM",
        windows="always",
        full_every=2,
        scales="gemma",
        is_tied=True,
        activation="gelu_pytorch_tanh",
        gguf="halves",
    ),
    "gemma3": Family(
        hf_class="Gemma3ForCausalLM",
        has_head_norms=True,
        windows="always",
        full_every=6,
        has_local_rope=True,
        scales="gemma",
        is_tied=True,
        activation="gelu_pytorch_tanh",
        gguf="halves",
    ),
    "mixtral": Family(hf_class="MixtralForCausalLM", windows="always", experts="mixtral"),
    "qwen3moe": Family(hf_class="Qwen3MoeForCausalLM", has_head_norms=True, windows="if used", experts="qwen3"),
    "gpt-oss": Family(
        hf_class="GptOssForCausalLM",
        has_biases=True,
        has_output_bias=True,
        has_sinks=True,
        windows="always",
        full_every=2,
        experts="mixtral",
    ),
}
"""By the name that llama.cpp gives them; engine/model/families/registry.py has the class of each."""
