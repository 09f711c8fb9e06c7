"""Tensors of a checkpoint that are several of ours, one below the other (Phi-3)."""

from runtime.checkpoint.families import FAMILIES
from runtime.checkpoint.model_config import ModelConfig

_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

FUSED = tuple(_PARTS)  # the last words of their names


def parts_of(name: str, config: ModelConfig) -> dict[str, int]:
    """The parts of the tensor `name` in order, with their rows; empty when it is a tensor of ours."""
    stem, _, kind = name.removesuffix(".weight").rpartition(".")
    if kind not in _PARTS or not FAMILIES[config.architecture].is_fused:
        return {}
    rows = {
        "q_proj": config.num_heads * config.head_dim,
        "k_proj": config.num_kv_heads * config.head_dim,
        "v_proj": config.num_kv_heads * config.head_dim,
        "gate_proj": config.intermediate_size,
        "up_proj": config.intermediate_size,
    }
    return {f"{stem}.{part}.weight": rows[part] for part in _PARTS[kind]}
