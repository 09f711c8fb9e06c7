"""Models that another engine computes: what is read of their config.json, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.checkpoint.foreign_config import MANY_POSITIONS, load_foreign_config, parse_foreign_config
from runtime.checkpoint.model_config import load_model_config
from runtime.checkpoint.model_files import resolve_model
from runtime.errors import ModelError
from tests.tiny_model import tiny_config, write_tiny_model

GPT2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 99, "n_embd": 64, "n_layer": 3, "n_head": 2}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "num_local_experts": 8,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}


def test_other_architectures_and_quantizations_are_read() -> None:
    config = parse_foreign_config(MIXTRAL, "m")
    assert (config.architecture, config.num_layers, config.num_kv_heads, config.head_dim) == (
        *("MixtralForCausalLM", 32),
        *(8, 128),
    )
    assert (config.max_position, config.dtype) == (32768, "bfloat16")


def test_older_names_of_keys_are_read() -> None:
    config = parse_foreign_config(GPT2 | {"n_positions": 128}, "m")
    assert (config.hidden_size, config.num_layers, config.head_dim, config.max_position) == (64, 3, 32, 128)
    assert parse_foreign_config(GPT2, "m").max_position == MANY_POSITIONS


def test_of_a_model_with_several_parts_the_one_for_text_counts() -> None:
    parts = {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"hidden_size": 7}}
    config = parse_foreign_config(parts | {"text_config": MIXTRAL}, "m")
    assert (config.architecture, config.hidden_size) == ("Gemma3ForConditionalGeneration", 4096)


@pytest.mark.parametrize("broken", [{"n_embd": 0}, {"n_head": "2"}, {"n_layer": True}, {"vocab_size": None}])
def test_a_key_that_is_no_size_is_named(broken: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(broken))):
        parse_foreign_config(GPT2 | broken, "m")


def test_a_model_that_our_engine_computes_has_the_same_shape_for_both(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    assert load_foreign_config(folder) == load_model_config(folder)


def test_what_our_engine_refuses_may_be_served_by_another(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    changed = tiny_config("llama") | {"architectures": ["OtherForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(changed))
    (folder / "quantize_config.json").write_text("{}")
    with pytest.raises(ModelError, match="not supported"):
        resolve_model(str(folder))
    assert resolve_model(str(folder), foreign=True).config.architecture == "OtherForCausalLM"
