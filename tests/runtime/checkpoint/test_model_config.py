import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from runtime.checkpoint.model_config import Llama3RopeScaling, ModelConfig, load_model_config, parse_model_config
from runtime.errors import ModelError
from tests.tiny_model import tiny_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def parse(architecture: str = "llama", **overrides: Any) -> ModelConfig:
    config = {key: value for key, value in (tiny_config(architecture) | overrides).items() if value is not None}
    return parse_model_config(config, "tiny")


def test_a_config_is_read_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3")))
    config = load_model_config(tmp_path)
    assert (config.architecture, config.num_layers, config.num_heads, config.num_kv_heads) == ("qwen3", 4, 4, 2)
    assert (config.hidden_size, config.head_dim, config.max_position, config.dtype) == (64, 16, 4096, "float32")


def test_missing_optional_keys_follow_the_architecture() -> None:
    assert parse(head_dim=None).head_dim == 16  # hidden size / heads
    assert parse("qwen3", head_dim=None).head_dim == 128
    assert parse(num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_llama3_rope_scaling_is_read_in_both_spellings(key: str) -> None:
    config = parse(rope_theta=500000.0, **{key: LLAMA3})
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 256)


def test_rope_parameters_carry_theta() -> None:
    config = parse(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert config.rope_theta == 1e6
    assert config.rope_scaling is None


@pytest.mark.parametrize("scaling", [{"rope_type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 2.0}])
def test_a_rope_scaling_that_is_not_implemented_is_refused(scaling: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"'(yarn|linear)' is not implemented; implemented: default, llama3"):
        parse(rope_scaling=scaling)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.* not supported"),
        ({"architectures": None}, "not supported, only LlamaForCausalLM"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"\(fp8\) are not served: take .* a \.gguf file"),
        ({"quantization_config": {"quant_method": "awq"}}, r"\(awq\) are not served"),
        ({"quantization_config": ["gptq"]}, "not served"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not served; served: bfloat16, float16, float32"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_attention_heads": 5}, "5 attention heads cannot share 2"),
        ({"hidden_size": "64"}, "hidden_size is '64', not a positive integer"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1, not a positive number"),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "factor is None"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor must be less"),
    ],
)
def test_what_would_compute_something_else_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(**overrides)


def test_a_sliding_window_counts_only_when_it_is_used() -> None:
    assert parse("qwen3", use_sliding_window=False, sliding_window=4096).architecture == "qwen3"
    with pytest.raises(ModelError, match="sliding-window"):
        parse("qwen3", use_sliding_window=True, sliding_window=4096)


@pytest.mark.parametrize("text", ["{", "[]", None])
def test_a_config_that_cannot_be_read_names_the_file(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_a_config_is_a_value() -> None:
    assert parse() == parse()
    assert dataclasses.replace(parse(), num_layers=2) == parse(num_hidden_layers=2)
