"""A model's shape, parsed from the config.json of a Hugging Face folder. No torch, because the router reads it too.

A key that asks for something that is not implemented is refused, because a model whose rope scaling was ignored talks
fluent nonsense. transformers' AutoConfig would read more than is needed and refuse nothing; its import takes 1.2 s of
CPU time without torch.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.checkpoint.families import FAMILIES, Family
from runtime.checkpoint.json_fields import number, size
from runtime.checkpoint.quantization import parse_quantization
from runtime.checkpoint.rope_config import Rope, parse_ropes
from runtime.errors import ModelError

DTYPES = ("bfloat16", "float16", "float32")


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
    tie_word_embeddings: bool
    dtype: str  # of the weights as published: one of DTYPES
    rope: Rope  # of layers that see all
    local_rope: Rope | None = None  # of layers with a window; None: as the others
    windows: tuple[int, ...] = ()  # by layer: a token sees so many, itself included; 0: all. Empty: all layers see all
    unrotated: tuple[int, ...] = ()  # layers without rotation
    embedding_scale: float = 1.0  # of the residual stream's beginning
    query_scale: float = 1.0  # of scores, beside 1 / sqrt(head_dim)
    residual_scale: float = 1.0  # of what a layer adds
    logit_scale: float = 1.0
    attention_softcap: float = 0.0  # scores are cap * tanh(score / cap); 0: as they are
    logit_softcap: float = 0.0
    num_experts: int = 0  # of each layer; 0: one MLP
    experts_per_token: int = 0
    expert_size: int = 0  # as intermediate_size, of each
    norms_expert_weights: bool = False  # whether the weights of the chosen experts sum to one
    swiglu_alpha: float = 1.702  # of gpt-oss's activation, and the bound of its inputs
    swiglu_limit: float = 7.0

    @property
    def widest_window(self) -> int:
        """0: no layer has a window."""
        return max(self.windows, default=0)

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def rope_of(self, layer: int) -> Rope | None:
        """None: the layer's heads are not rotated."""
        if layer in self.unrotated:
            return None
        return self.local_rope if self.local_rope is not None and self.window(layer) else self.rope

    @property
    def has_plain_scores(self) -> bool:
        """Whether all layers attend to whole contexts with scores as they are."""
        return not any(self.windows) and not self.attention_softcap and not FAMILIES[self.architecture].has_sinks


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
    hidden_size = size(data, "hidden_size", model)
    num_layers = size(data, "num_hidden_layers", model)
    num_heads = size(data, "num_attention_heads", model)
    num_kv_heads = size(data, "num_key_value_heads", model, default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(model, f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads")
    head_dim = size(data, "head_dim", model, default=family.default_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(model, f"head_dim {head_dim} is odd; rotary embeddings need pairs")
    max_position = size(data, "max_position_embeddings", model)
    rope, local_rope = parse_ropes(data, family, head_dim, max_position, model)
    windows = _windows(data, family, num_layers, max_position, model)
    return ModelConfig(
        architecture=known[0],
        vocab_size=size(data, "vocab_size", model),
        hidden_size=hidden_size,
        intermediate_size=size(data, "intermediate_size", model),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=number(data, "rms_norm_eps", model, default=1e-6),
        tie_word_embeddings=bool(data.get("tie_word_embeddings", family.is_tied)),
        dtype=_dtype(data, model),
        rope=rope,
        local_rope=local_rope if windows and local_rope != rope else None,
        windows=windows,
        unrotated=_unrotated(data, family, num_layers, model),
        **_scales(data, family, hidden_size, head_dim, model),
        **_experts(data, family, model),
    )


def served_dtype(published: str, wanted: str, *, on_gpu: bool) -> str:
    """The dtype of weights and KV. `published`: the checkpoint's. `wanted`: engine.dtype, where `auto` is float32 on a
    CPU. On a GPU bfloat16 takes the place of a published float32, because steps are then quicker and twice as much KV
    fits. `fp8` is about projections alone: beside it is bfloat16, the one dtype of products in 8 bits."""
    if wanted not in ("auto", "fp8"):
        return wanted
    if not on_gpu:
        return "float32"
    if wanted == "fp8":
        return "bfloat16"
    return "bfloat16" if published == "float32" else published


def _refuse_variants(data: dict[str, Any], family: Family, model: str) -> None:
    """Refuses variants of a family that compute something else than our class does."""
    known = {"attention_bias": family.has_output_bias, "mlp_bias": False, "use_bidirectional_attention": False}
    for key, value in known.items():
        if bool(data.get(key, value)) != value:
            raise ModelError(model, f"{key} {data[key]!r:.40} is not supported")
    for key in ("hidden_act", "hidden_activation"):
        if data.get(key) not in (None, family.activation):
            raise ModelError(model, f"{key} {data[key]!r:.40} is not supported; supported: {family.activation}")
    parse_quantization(data, model)


def _windows(data: dict[str, Any], family: Family, num_layers: int, max_position: int, model: str) -> tuple[int, ...]:
    """Of each layer; empty when all see all. `layer_types` of newer files names the layers with a window; before, a
    family's rule did."""
    kinds = data.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != num_layers):
        raise ModelError(model, f"config.json: layer_types is no list of {num_layers}, one for each layer")
    for kind in kinds or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(model, f"layer_types: {kind!r:.40} is not supported")
    is_used = family.windows == "always" or (family.windows == "if used" and data.get("use_sliding_window"))
    if not is_used or data.get("sliding_window") is None:
        if "sliding_attention" in (kinds or ()) or (not family.windows and data.get("use_sliding_window")):
            raise ModelError(model, "sliding_attention is not supported without a sliding_window that is used")
        return ()
    window = size(data, "sliding_window", model)
    if kinds is None:
        period = size(data, "sliding_window_pattern", model, default=family.full_every or num_layers + 1)
        first = size(data, "max_window_layers", model) if data.get("max_window_layers") else 0
        slides = [i >= first and (i + 1) % period != 0 for i in range(num_layers)]
        kinds = ["sliding_attention" if one else "full_attention" for one in slides]
    if window >= max_position and not family.has_local_rope:
        return ()
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return windows if any(windows) else ()


def _unrotated(data: dict[str, Any], family: Family, num_layers: int, model: str) -> tuple[int, ...]:
    if not family.unrotated_every:
        return ()
    rotated = data.get("no_rope_layers")  # which says 1 where a layer is rotated
    if rotated is None:
        period = size(data, "no_rope_layer_interval", model, default=family.unrotated_every)
        rotated = [int((layer + 1) % period != 0) for layer in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) < num_layers:
        raise ModelError(model, f"config.json: no_rope_layers is no list of {num_layers}, one for each layer")
    return tuple(layer for layer in range(num_layers) if not rotated[layer])


def _experts(data: dict[str, Any], family: Family, model: str) -> dict[str, Any]:
    """Qwen3's number of experts is `num_local_experts` where transformers 5 has written it."""
    if not family.experts:
        return {}
    if data.get("mlp_only_layers") or data.get("decoder_sparse_step", 1) != 1:
        raise ModelError(model, "layers without experts (mlp_only_layers, decoder_sparse_step) are not supported")
    is_mixtral = family.experts == "mixtral"
    count = size(data, "num_local_experts" if is_mixtral or "num_experts" not in data else "num_experts", model)
    per_token = size(data, "num_experts_per_tok", model)
    if per_token > count:
        raise ModelError(model, f"num_experts_per_tok {per_token} is more than the {count} experts")
    return {
        "num_experts": count,
        "experts_per_token": per_token,
        "expert_size": size(data, "intermediate_size" if is_mixtral else "moe_intermediate_size", model),
        "norms_expert_weights": is_mixtral or bool(data.get("norm_topk_prob")),
        "swiglu_alpha": number(data, "swiglu_alpha", model, default=1.702),
        "swiglu_limit": number(data, "swiglu_limit", model, default=7.0),
    }


def _scales(data: dict[str, Any], family: Family, hidden_size: int, head_dim: int, model: str) -> dict[str, Any]:
    if family.scales == "granite":
        return {
            "embedding_scale": number(data, "embedding_multiplier", model, default=1.0),
            "query_scale": number(data, "attention_multiplier", model, default=1.0) * head_dim**0.5,
            "residual_scale": number(data, "residual_multiplier", model, default=1.0),
            "logit_scale": 1 / number(data, "logits_scaling", model, default=1.0),
        }
    if family.scales == "gemma":
        keys = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
        caps = {ours: number(data, key, model) for ours, key in keys.items() if data.get(key) is not None}
        scalar = number(data, "query_pre_attn_scalar", model, default=256.0)
        return {"embedding_scale": hidden_size**0.5, "query_scale": (head_dim / scalar) ** 0.5, **caps}
    return {}


def _dtype(data: dict[str, Any], model: str) -> str:
    dtype = str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(model, f"dtype {dtype[:40]!r} is not served; served: {', '.join(DTYPES)}")
    return dtype
