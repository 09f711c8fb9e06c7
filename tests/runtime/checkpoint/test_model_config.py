import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from runtime.checkpoint.families import FAMILIES
from runtime.checkpoint.model_config import ModelConfig, load_model_config, parse_model_config
from runtime.checkpoint.rope_config import Rope, RopeScaling
from runtime.errors import ModelError
from tests.tiny_model import tiny_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


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
    assert config.rope == Rope(500000.0, 16, RopeScaling("llama3", 8.0, 256, 1.0, 4.0))


def test_rope_parameters_carry_theta() -> None:
    config = parse(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert config.rope == Rope(1e6, 16)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, "'dynamic' is not implemented; implemented: default, linear"),
        ({"type": "linear"}, "factor is None, not a positive number"),
        ({"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings is None"),
        (YARN | {"mscale": -1.0, "mscale_all_dim": 1.0}, "mscale is -1.0, not a positive number"),
        ({"rope_type": "longrope", "long_factor": [1.0] * 8}, "long_factor and short_factor need 8 positive numbers"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 7 + [0.0]}, "need 8 positive numbers"),
        ({"partial_rotary_factor": 0.45}, "rotates 7 of 16 dimensions"),
        ([1], "not an object"),
    ],
)
def test_a_rope_that_would_be_another_is_refused(scaling: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(rope_scaling=scaling)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.* not supported"),
        ({"architectures": None}, "not supported, only LlamaForCausalLM"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is no list of 4"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention is not supported without"),
        ({"layer_types": ["chunked_attention"] * 4}, "'chunked_attention' is not supported"),
        ({"use_sliding_window": True, "sliding_window": 8}, "sliding_attention is not supported without"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"quantization_config": {"quant_method": "awq"}}, r"\(awq\) are not served: take .* a \.gguf file"),
        ({"quantization_config": ["gptq"]}, "not served"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not served; served: bfloat16, float16, float32"),
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


def test_a_sliding_window_counts_only_when_it_is_used_and_shorter_than_contexts() -> None:
    assert parse("qwen3", use_sliding_window=False, sliding_window=64).windows == ()
    assert parse("qwen3", use_sliding_window=True, sliding_window=4096).windows == ()
    assert parse("qwen3", use_sliding_window=True, sliding_window=64).windows == (64,) * 4
    assert parse("qwen3", use_sliding_window=True, sliding_window=64, max_window_layers=3).windows == (0, 0, 0, 64)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 experts"),
        ({"mlp_only_layers": [0]}, "layers without experts"),
        ({"decoder_sparse_step": 2}, "layers without experts"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is None"),
    ],
)
def test_experts_that_would_be_others_are_refused(keys: dict[str, Any], message: str) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32} | keys
    with pytest.raises(ModelError, match=message):
        of_family("qwen3moe", **experts)


def test_a_gpt_oss_without_biases_is_refused() -> None:
    with pytest.raises(ModelError, match="attention_bias False is not supported"):
        of_family("gpt-oss", attention_bias=False)


def of_family(architecture: str, **keys: Any) -> ModelConfig:
    return parse(architectures=[FAMILIES[architecture].hf_class], **keys)


def test_a_familys_rule_says_which_layers_have_a_window_where_the_file_does_not() -> None:
    gelu = {"hidden_act": "gelu_pytorch_tanh", "sliding_window": 64}
    assert of_family("mistral", sliding_window=64).windows == (64,) * 4
    assert of_family("gemma2", **gelu).windows == (64, 0, 64, 0)
    assert of_family("olmo3", sliding_window=64).windows == (64, 64, 64, 0)
    gemma3 = of_family("gemma3", num_hidden_layers=7, rope_theta=1e6, rope_local_base_freq=1e4, **gelu)
    assert gemma3.windows == (64, 64, 64, 64, 64, 0, 64)
    assert [gemma3.rope_of(layer) for layer in (4, 5)] == [Rope(1e4, 16), Rope(1e6, 16)]
    experts = {"attention_bias": True, "num_local_experts": 4, "num_experts_per_tok": 2}
    assert of_family("gpt-oss", sliding_window=64, **experts).windows == (64, 0, 64, 0)
    smollm3 = of_family("smollm3", num_hidden_layers=8)
    assert [layer for layer in range(8) if smollm3.rope_of(layer) is None] == [3, 7]


@pytest.mark.parametrize("text", ["{", "[]", None])
def test_a_config_that_cannot_be_read_names_the_file(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_a_config_is_a_value() -> None:
    assert parse() == parse()
    assert dataclasses.replace(parse(), num_layers=2) == parse(num_hidden_layers=2)
