from typing import Any

import pytest

from runtime.checkpoint.quantization import Quantization, parse_quantization
from runtime.errors import ModelError

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": ["lm_head"]}
WEIGHTS = {
    "num_bits": 8,
    "type": "float",
    "strategy": "channel",
    "symmetric": True,
    "dynamic": False,
    "group_size": None,
}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"weights": WEIGHTS | weights, "input_activations": {"num_bits": 8}, "targets": ["Linear"]}
    return COMPRESSED | {"config_groups": {"group_0": group}, "kv_cache_scheme": None, "sparsity_config": {}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (FP8, Quantization()),
        (FP8 | {"weight_block_size": [128, 64]}, Quantization((128, 64))),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, Quantization(is_mxfp4=True)),
        (compressed(), Quantization()),
        (compressed(strategy="block", block_structure=[128, 128]), Quantization((128, 128))),
    ],
)
def test_what_scales_belong_to_is_read(given: dict[str, Any] | None, expected: Quantization | None) -> None:
    assert parse_quantization({"quantization_config": given}, "tiny") == expected


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"quant_method": "awq"}, "awq"),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (FP8 | {"weight_block_size": [128]}, r"fp8: blocks of \[128\]"),
        (FP8 | {"rotation": 2}, "rotation"),
        (compressed(num_bits=4), "num_bits 4"),
        (compressed(type="int"), "type 'int'"),
        (compressed(strategy="group"), "strategy 'group'"),
        (compressed(group_size=32), "group_size"),
        (compressed(symmetric=False), "symmetric False"),
        (compressed() | {"format": "pack-quantized"}, "format 'pack-quantized'"),
        (compressed() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (COMPRESSED, "compressed-tensors: config_groups"),
    ],
)
def test_what_is_not_known_is_refused_by_its_name(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=rf"quantized safetensors \({problem}\) are not served"):
        parse_quantization({"quantization_config": given}, "tiny")
