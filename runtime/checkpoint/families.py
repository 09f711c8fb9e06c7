"""The model families that are served: one row each, with all that distinguishes their checkpoints. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    hf_class: str  # in `architectures` of config.json
    default_head_dim: int | None = None  # where config.json says none; None: hidden size / attention heads
    has_head_norms: bool = False  # query and key heads are normalised: tensors q_norm and k_norm
    knows_windows: bool = False  # `use_sliding_window` of config.json means something
    gguf_pairs: bool = False  # llama.cpp rotates neighbours (2i, 2i + 1), and orders the rows of q and k accordingly


FAMILIES = {
    "llama": Family(hf_class="LlamaForCausalLM", gguf_pairs=True),
    "qwen3": Family(hf_class="Qwen3ForCausalLM", default_head_dim=128, has_head_norms=True, knows_windows=True),
}
"""By the name that llama.cpp gives them; engine/model/registry.py has the class of each."""
