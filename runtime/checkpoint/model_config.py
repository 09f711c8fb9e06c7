"""A model's shape, parsed from the config.json of a Hugging Face folder. No torch, because the router reads it too.

A key that asks for something that is not implemented is refused, because a model whose rope scaling was ignored talks
fluent nonsense. transformers' AutoConfig would read more than is needed and refuse nothing; its import takes 1.2 s of
CPU time without torch.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from runtime.checkpoint.families import FAMILIES, Family
from runtime.errors import ModelError

DEFAULT_ROPE_THETA = 10000.0
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Llama 3.1's stretched rotary embedding: long wavelengths are slowed down by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str  # a key of FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    tie_word_embeddings: bool
    dtype: str  # of the weights as published: one of DTYPES


def load_model_config(folder: Path) -> ModelConfig:
    """Reads folder/config.json. Raises ModelError."""
    return parse_model_config(read_object(folder / "config.json"), str(folder))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model's folder. Raises ModelError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(str(path.parent), f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(str(path.parent), f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(str(path.parent), f"{path.name} is not an object")
    return data


def parse_model_config(data: dict[str, Any], model: str) -> ModelConfig:
    """Checks config.json's keys as transformers 4 and 5 write them. Raises ModelError naming the key."""
    architectures = data.get("architectures") or []
    known = [name for name, family in FAMILIES.items() if family.hf_class in architectures]
    if not known:
        supported = ", ".join(family.hf_class for family in FAMILIES.values())
        raise ModelError(model, f"architectures {architectures} are not supported, only {supported}")
    family = FAMILIES[known[0]]
    _refuse_variants(data, family, model)
    hidden_size = _size(data, "hidden_size", model)
    num_heads = _size(data, "num_attention_heads", model)
    num_kv_heads = _size(data, "num_key_value_heads", model, default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(model, f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads")
    head_dim = _size(data, "head_dim", model, default=family.default_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(model, f"head_dim {head_dim} is odd; rotary embeddings need pairs")
    return ModelConfig(
        architecture=known[0],
        vocab_size=_size(data, "vocab_size", model),
        hidden_size=hidden_size,
        intermediate_size=_size(data, "intermediate_size", model),
        num_layers=_size(data, "num_hidden_layers", model),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=_size(data, "max_position_embeddings", model),
        rms_norm_eps=_number(data, "rms_norm_eps", model, default=1e-6),
        rope_theta=_rope_theta(data, model),
        rope_scaling=_rope_scaling(data, model),
        tie_word_embeddings=bool(data.get("tie_word_embeddings", False)),
        dtype=_dtype(data, model),
    )


def served_dtype(published: str, wanted: str, *, on_gpu: bool) -> str:
    """The dtype of weights and KV. `published`: the checkpoint's. `wanted`: engine.dtype, where `auto` is float32 on a
    CPU. On a GPU bfloat16 takes the place of a published float32, because steps are then quicker and twice as much KV
    fits."""
    if wanted != "auto":
        return wanted
    if not on_gpu:
        return "float32"
    return "bfloat16" if published == "float32" else published


def _refuse_variants(data: dict[str, Any], family: Family, model: str) -> None:
    """Refuses variants of a family that compute something else than our class does."""
    for key in ("attention_bias", "mlp_bias"):
        if data.get(key):
            raise ModelError(model, f"{key} is not supported")
    if data.get("hidden_act", "silu") != "silu":
        raise ModelError(model, f"hidden_act {data['hidden_act']!r} is not supported; supported: silu")
    windowed = family.knows_windows and data.get("use_sliding_window") and data.get("sliding_window")
    # Newer files list the kind of each layer.
    if windowed or any(kind != "full_attention" for kind in data.get("layer_types") or []):
        raise ModelError(model, "sliding-window attention is not supported")
    if quantization := data.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        refuse_quantized(str(method or "quantization_config")[:40], model)


def refuse_quantized(method: str, model: str) -> NoReturn:
    """`method`: what has quantized the safetensors, as the model's folder names it. Raises ModelError."""
    way = f"take the model's {', '.join(DTYPES)} safetensors, or a .gguf file of any quantization"
    raise ModelError(model, f"quantized safetensors ({method}) are not served: {way}")


def _dtype(data: dict[str, Any], model: str) -> str:
    dtype = str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(model, f"dtype {dtype[:40]!r} is not served; served: {', '.join(DTYPES)}")
    return dtype


def _rope_parameters(data: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`, theta included; earlier versions `rope_scaling` beside `rope_theta`."""
    return data.get("rope_parameters") or data.get("rope_scaling") or {}


def _rope_theta(data: dict[str, Any], model: str) -> float:
    default = _number(data, "rope_theta", model, default=DEFAULT_ROPE_THETA)
    return _number(_rope_parameters(data), "rope_theta", model, default=default)


def _rope_scaling(data: dict[str, Any], model: str) -> Llama3RopeScaling | None:
    parameters = _rope_parameters(data)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    partial = parameters.get("partial_rotary_factor", data.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(model, f"partial_rotary_factor {partial} is not supported")
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(model, f"rope_scaling of type {kind!r} is not implemented; implemented: default, llama3")
    scaling = Llama3RopeScaling(
        factor=_number(parameters, "factor", model),
        low_freq_factor=_number(parameters, "low_freq_factor", model),
        high_freq_factor=_number(parameters, "high_freq_factor", model),
        original_max_position=_size(parameters, "original_max_position_embeddings", model),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ModelError(model, "rope_scaling: low_freq_factor must be less than high_freq_factor")
    return scaling


def _size(data: dict[str, Any], key: str, model: str, default: int | None = None) -> int:
    return int(_positive(data, key, model, default, int, "integer"))


def _number(data: dict[str, Any], key: str, model: str, default: float | None = None) -> float:
    return float(_positive(data, key, model, default, (int, float), "number"))


def _positive(data: dict[str, Any], key: str, model: str, default: Any, kind: Any, name: str) -> Any:
    value = default if data.get(key) is None else data[key]
    if not isinstance(value, kind) or isinstance(value, bool) or value <= 0:
        raise ModelError(model, f"config.json: {key} is {value!r}, not a positive {name}")
    return value
