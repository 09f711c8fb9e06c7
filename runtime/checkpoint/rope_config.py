"""How a model turns positions into rotations, parsed from config.json. engine/model/rope.py computes it."""

import math
from dataclasses import dataclass
from typing import Any

from runtime.checkpoint.families import Family
from runtime.checkpoint.json_fields import number, size
from runtime.errors import ModelError

DEFAULT_ROPE_THETA = 10000.0
KINDS = ("default", "linear", "llama3", "longrope", "yarn")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """What stretches the wavelengths for longer contexts than a model was trained on.

    linear: all of them by `factor`. llama3: those above original / low by `factor`, those below original / high not at
    all, the rest by part (Llama 3.1). yarn: the same with dimensions [low, high] as the part between (Peng et al.).
    longrope: each by its own of `factors` (Ding et al.).
    """

    kind: str  # one of KINDS
    factor: float = 1.0
    original_max_position: int = 0
    low: float = 0.0
    high: float = 0.0
    factors: tuple[float, ...] = ()
    attention_factor: float = 1.0  # of queries and keys


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float
    dim: int  # the first dimensions of a head, which are rotated
    scaling: RopeScaling | None = None
    query_beta: float = 0.0  # queries grow by 1 + beta * log(1 + position // period) (Llama 4, Ministral 3)
    query_period: int = 0


def parse_ropes(
    data: dict[str, Any], family: Family, head_dim: int, max_position: int, model: str
) -> tuple[Rope, Rope]:
    """The rope of layers that see all, and that of layers with a window. Raises ModelError.

    transformers 5 writes `rope_parameters`, theta included, for models with two of them one per kind of layer; earlier
    versions write `rope_scaling` beside `rope_theta`.
    """
    parameters = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ModelError(model, f"config.json: rope parameters are {parameters!r:.60}, not an object")
    local: dict[str, Any] = parameters
    if family.has_local_rope:
        local = {"rope_theta": data.get("rope_local_base_freq") or data.get("rope_theta")}
    if isinstance(full := parameters.get("full_attention"), dict):
        parameters, local = full, parameters.get("sliding_attention") or {}
    whole = dict(data) | {"max_position_embeddings": max_position}
    return _rope(whole, parameters, head_dim, model), _rope(whole, local, head_dim, model)


def _rope(data: dict[str, Any], parameters: dict[str, Any], head_dim: int, model: str) -> Rope:
    default = number(data, "rope_theta", model, default=DEFAULT_ROPE_THETA)
    theta = number(parameters, "rope_theta", model, default=default)
    part = number(parameters, "partial_rotary_factor", model, default=data.get("partial_rotary_factor") or 1.0)
    dim = int(head_dim * part)
    if dim % 2 or not 0 < dim <= head_dim:
        raise ModelError(model, f"partial_rotary_factor {part} rotates {dim} of {head_dim} dimensions, no pairs")
    scaling = _scaling(data, parameters, theta, dim, model)
    if not parameters.get("llama_4_scaling_beta"):
        return Rope(theta, dim, scaling)
    beta = number(parameters, "llama_4_scaling_beta", model)
    return Rope(theta, dim, scaling, beta, size(parameters, "original_max_position_embeddings", model))


def _scaling(
    data: dict[str, Any], parameters: dict[str, Any], theta: float, dim: int, model: str
) -> RopeScaling | None:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    match kind:
        case "default":
            return None
        case "linear":
            return RopeScaling(kind, number(parameters, "factor", model))
        case "llama3":
            return _llama3(parameters, model)
        case "yarn":
            return _yarn(parameters, theta, dim, model)
        case "longrope" | "su":
            return _longrope(data, parameters, dim, model)
    raise ModelError(model, f"rope_scaling of type {kind!r:.40} is not implemented; implemented: {', '.join(KINDS)}")


def _llama3(parameters: dict[str, Any], model: str) -> RopeScaling:
    low, high = number(parameters, "low_freq_factor", model), number(parameters, "high_freq_factor", model)
    if low >= high:
        raise ModelError(model, "rope_scaling: low_freq_factor must be less than high_freq_factor")
    original = size(parameters, "original_max_position_embeddings", model)
    return RopeScaling("llama3", number(parameters, "factor", model), original, low, high)


def _yarn(parameters: dict[str, Any], theta: float, dim: int, model: str) -> RopeScaling:
    """`low` and `high` are dimensions whose wavelengths turn beta_fast and beta_slow times within the original
    context."""
    factor = number(parameters, "factor", model)
    original = size(parameters, "original_max_position_embeddings", model)
    turns = [number(parameters, key, model, default) for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0))]
    low, high = (dim * math.log(original / (each * 2 * math.pi)) / (2 * math.log(theta)) for each in turns)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    attention = _stretch(factor)
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):  # one alone does not count
        scale, divisor = (number(parameters, key, model) for key in ("mscale", "mscale_all_dim"))
        attention = _stretch(factor, scale) / _stretch(factor, divisor)
    attention = number(parameters, "attention_factor", model, default=attention)
    return RopeScaling("yarn", factor, original, max(low, 0), min(high, dim - 1), attention_factor=attention)


def _stretch(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def _longrope(data: dict[str, Any], parameters: dict[str, Any], dim: int, model: str) -> RopeScaling:
    """A model with two lists of factors takes the long ones for contexts beyond the original, and here for all, because
    cached keys are rotated once."""
    longest = size(data, "max_position_embeddings", model)
    key = "original_max_position_embeddings"
    original = size(parameters, key, model, default=data.get(key) or longest)
    stretched = number(parameters, "factor", model, default=longest / original)
    factors = parameters.get("long_factor" if longest > original else "short_factor")
    if not isinstance(factors, list) or len(factors) != dim // 2 or not all(map(_is_positive, factors)):
        raise ModelError(model, f"rope_scaling: long_factor and short_factor need {dim // 2} positive numbers each")
    attention = math.sqrt(1 + math.log(stretched) / math.log(original)) if stretched > 1 else 1.0
    attention = number(parameters, "attention_factor", model, default=attention)
    return RopeScaling("longrope", 1.0, original, factors=tuple(map(float, factors)), attention_factor=attention)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
