"""The shape of a model that another engine computes, as far as the router and the books of KV blocks need it.

Our own engine refuses what it would compute wrongly (see model_config.py). Here nothing is refused for what it asks of
an engine, because vLLM knows.
"""

from pathlib import Path
from typing import Any

from runtime.checkpoint.model_config import DTYPES, ModelConfig, parse_model_config, read_object
from runtime.checkpoint.rope_config import DEFAULT_ROPE_THETA, Rope
from runtime.errors import ModelError

NAMES = {
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels"),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "n_inner", "d_ff"),
    "max_position": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length"),
}
"""Our fields by the keys that config.json has them under, the usual one first."""
MANY_POSITIONS = 2**20  # where config.json names no bound; the workers tell theirs


def load_foreign_config(folder: Path) -> ModelConfig:
    """Reads folder/config.json. A model that our own engine computes too has the same ModelConfig for both. Raises
    ModelError."""
    data = read_object(folder / "config.json")
    try:
        return parse_model_config(data, str(folder))
    except ModelError:
        return parse_foreign_config(data, str(folder))


def parse_foreign_config(data: dict[str, Any], model: str) -> ModelConfig:
    """Raises ModelError naming the key that is missing. A model of several parts has the one for text under
    `text_config`."""
    inner = data.get("text_config")
    text = data | {key: value for key, value in inner.items() if value is not None} if isinstance(inner, dict) else data
    hidden_size, num_heads = _size(text, "hidden_size", model), _size(text, "num_heads", model)
    dtype = str(text.get("dtype") or text.get("torch_dtype")).removeprefix("torch.")
    named = data.get("architectures")
    architectures = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    return ModelConfig(
        architecture=architectures[0][:100] if architectures else "unknown",
        vocab_size=_size(text, "vocab_size", model),
        hidden_size=hidden_size,
        intermediate_size=_size(text, "intermediate_size", model, 4 * hidden_size),
        num_layers=_size(text, "num_layers", model),
        num_heads=num_heads,
        num_kv_heads=_size(text, "num_kv_heads", model, num_heads),
        head_dim=_size(text, "head_dim", model, max(1, hidden_size // num_heads)),
        max_position=_size(text, "max_position", model, MANY_POSITIONS),
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        dtype=dtype if dtype in DTYPES else DTYPES[0],
        rope=Rope(DEFAULT_ROPE_THETA, 2),
    )


def _size(data: dict[str, Any], field: str, model: str, default: int | None = None) -> int:
    key = next((key for key in NAMES[field] if data.get(key) is not None), None)
    value = default if key is None else data[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ModelError(model, f"config.json: {key or NAMES[field][0]} is {value!r}, not a positive integer")
    return value
