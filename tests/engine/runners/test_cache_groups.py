"""How many tokens a slab holds in two groups of layers, beside one of the same bytes in one group."""

import pytest

from engine.runners.cache_groups import in_two_groups
from kvtransfer.slab.layout import SlabLayout
from runtime.checkpoint.model_config import ModelConfig, parse_model_config

GEMMA3_27B = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 262208,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 168,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "attention_bias": True,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}


def layouts(model: ModelConfig, gib: float, max_running: int = 256, longest: int = 0) -> tuple[SlabLayout, SlabLayout]:
    """In one group, and in two. Blocks of 64 in bfloat16, as on a GPU."""
    block = SlabLayout(model.num_layers, 1, model.num_kv_heads, 64, model.head_dim, "bfloat16")
    one = SlabLayout(
        model.num_layers, int(gib * 2**30) // block.nbytes, model.num_kv_heads, 64, model.head_dim, "bfloat16"
    )
    return one, in_two_groups(one, model, max_running, 8192, longest or model.max_position)


def held(data: dict[str, object], gib: float, max_running: int = 256) -> float:
    """Times as many tokens as in one group."""
    one, two = layouts(parse_model_config(data, "model"), gib, max_running)
    assert two.nbytes <= one.nbytes
    assert one.nbytes - two.nbytes < one.num_layers * one.block_bytes
    return two.num_blocks / one.num_blocks


@pytest.mark.parametrize(
    ("model", "gib", "max_running", "times"),
    [
        (GEMMA3_27B, 75.0, 256, 2.73),  # beside the weights on an H200
        (GEMMA3_27B, 75.0, 32, 3.65),
        (GPT_OSS_20B, 110.0, 256, 1.96),
        (GPT_OSS_20B, 20.0, 256, 1.76),
    ],
)
def test_tokens_held_beside_one_group(model: dict[str, object], gib: float, max_running: int, times: float) -> None:
    assert held(model, gib, max_running) == pytest.approx(times, abs=0.01)


def test_where_all_layers_have_a_window_block_ids_cost_nothing() -> None:
    one, two = layouts(parse_model_config(MISTRAL_7B, "model"), 100.0)
    assert (two.num_window_blocks, two.nbytes) == (one.num_blocks, one.nbytes)
    assert two.num_blocks == one.num_blocks // 65 * 512


def test_one_group_is_kept_where_two_hold_no_more() -> None:
    gemma = parse_model_config(GEMMA3_27B, "model")
    plain = parse_model_config(MISTRAL_7B | {"sliding_window": None}, "model")
    for model, gib, longest in ((plain, 100.0, 0), (gemma, 100.0, 1024), (gemma, 0.5, 0)):
        one, two = layouts(model, gib, longest=longest)
        assert two is one
