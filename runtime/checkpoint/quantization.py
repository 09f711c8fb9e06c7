"""How a checkpoint's quantized weights are read, parsed from config.json's `quantization_config`.

Weights of float8_e4m3fn have a scale each, or one for each row or block; of MXFP4, 32 numbers have an exponent. They
are served as the products, or as they are (`engine.dtype: fp8`). Scales that a file has for activations are not used:
activations stay as they are, or each token's get a scale of their own.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

from runtime.errors import ModelError

_IGNORED = {  # keys that change nothing about the weights' values
    "fp8": ("activation_scheme", "modules_to_not_convert", "ignored_layers", "scale_fmt"),
    "mxfp4": ("modules_to_not_convert",),
    "compressed-tensors": ("ignore", "quantization_status", "version", "global_compression_ratio"),
    "weights": ("observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
    "group": ("targets", "input_activations", "format"),
}


@dataclass(frozen=True, slots=True)
class Quantization:
    block: tuple[int, int] | None = None  # rows and columns that share a scale; None: a tensor's or a row's
    is_mxfp4: bool = False


def parse_quantization(data: dict[str, Any], model: str) -> Quantization | None:
    """None: weights are not quantized. Raises ModelError naming what is not known."""
    given = data.get("quantization_config")
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else None
    if method == "fp8":
        _check(given, method, {"quant_method": (method,), "fmt": ("e4m3",)}, ("weight_block_size",), model)
        return Quantization(_block(given.get("weight_block_size"), method, model))
    if method == "mxfp4":
        _check(given, method, {"quant_method": (method,)}, ("dequantize",), model)
        return Quantization(is_mxfp4=True)
    if method != "compressed-tensors":
        refuse_quantized(str(method or "quantization_config")[:40], model)
    return _compressed(given, method, model)


def refuse_quantized(method: str, model: str) -> NoReturn:
    """`method`: what has quantized the safetensors, as the model's folder names it. Raises ModelError."""
    way = "take the model's bfloat16, float16, float32, fp8 or MXFP4 safetensors, or a .gguf file of any quantization"
    raise ModelError(model, f"quantized safetensors ({method}) are not served: {way}")


def _compressed(given: dict[str, Any], method: str, model: str) -> Quantization:
    """All groups of layers must have blocks of one size."""
    _check(given, method, {"quant_method": (method,), "format": ("float-quantized",)}, ("config_groups",), model)
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        refuse_quantized(f"{method}: config_groups", model)
    blocks = set()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            refuse_quantized(f"{method}: config_groups without weights", model)
        _check(group, "group", {"format": ("float-quantized",)}, ("weights",), model)
        strategies = ("tensor", "channel", "block")
        expected = {"num_bits": (8,), "type": ("float",), "strategy": strategies, "symmetric": (True,)}
        _check(weights, "weights", expected, ("block_structure",), model)
        blocks.add(_block(weights.get("block_structure"), method, model))
    if len(blocks) > 1:
        refuse_quantized(f"{method}: block_structure of several sizes", model)
    return Quantization(blocks.pop())


def _check(
    given: dict[str, Any], part: str, expected: dict[str, tuple[Any, ...]], read: tuple[str, ...], model: str
) -> None:
    """Refuses a key that is not known, unless it is empty, and a value that is not expected."""
    for key, value in given.items():
        if key in expected and value is not None and value not in expected[key]:
            refuse_quantized(f"{key} {value!r:.40}", model)
        if value and key not in expected and key not in (*read, *_IGNORED[part]):
            refuse_quantized(f"{key[:40]}", model)


def _block(value: Any, method: str, model: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        refuse_quantized(f"{method}: blocks of {value!r:.40}", model)
    return value[0], value[1]
