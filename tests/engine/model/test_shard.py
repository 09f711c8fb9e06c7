"""What each rank holds."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.model.shard import shard_of, vocabulary_share
from engine.model.weights import Weights
from kvtransfer.slab.head_plan import sending_ranks
from runtime.checkpoint.model_config import ModelConfig, load_model_config, parse_model_config
from runtime.errors import ConfigError, ModelError
from tests.tiny_model import tiny_config, write_tiny_model


def model(**overrides: object) -> ModelConfig:
    return parse_model_config(tiny_config("llama") | overrides, "tiny")


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_head_row_and_token_is_held_once(size: int) -> None:
    config = model(num_attention_heads=16, num_key_value_heads=8, vocab_size=523)
    shards = [shard_of(config, rank, size) for rank in range(size)]
    assert [head for shard in shards for head in shard.query_heads] == list(range(16))
    assert [head for shard in shards for head in shard.kv_heads] == list(range(8))
    assert [row for shard in shards for row in shard.mlp_rows] == list(range(128))
    assert [token for shard in shards for token in shard.vocabulary] == list(range(523))
    share = vocabulary_share(523, size)
    assert {len(shard.vocabulary) for shard in shards[:-1]} <= {share}
    assert 0 < len(shards[-1].vocabulary) <= share


@pytest.mark.parametrize(("heads", "size"), [(8, 1), (8, 2), (8, 4), (8, 8), (2, 4), (2, 8), (1, 4), (4, 8)])
def test_the_first_rank_that_holds_a_head_is_its_owner(heads: int, size: int) -> None:
    config = model(num_attention_heads=16, num_key_value_heads=heads)
    holders: dict[int, list[int]] = {}
    for rank in range(size):
        for head in shard_of(config, rank, size).kv_heads:
            holders.setdefault(head, []).append(rank)
    owners = {head: rank for rank in sending_ranks(size, heads) for head in shard_of(config, rank, size).kv_heads}
    assert [owners[head] for head in range(heads)] == [holders[head][0] for head in range(heads)]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_query_head_finds_its_key_value_head_on_its_rank(size: int) -> None:
    config = model(num_attention_heads=16, num_key_value_heads=2)
    for rank in range(size):
        shard = shard_of(config, rank, size)
        group = len(shard.query_heads) // len(shard.kv_heads)
        for place, head in enumerate(shard.query_heads):
            assert shard.kv_heads[place // group] == head // 8


@pytest.mark.parametrize(
    ("overrides", "size", "problem"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}, 2, "9 attention heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 4, "3 key-value heads"),
        ({"intermediate_size": 130}, 4, "130 MLP rows"),
        ({"num_attention_heads": 8, "vocab_size": 9}, 8, "9 tokens of the vocabulary"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_by_what_does_not_fit(
    overrides: dict[str, int], size: int, problem: str
) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.tensor_parallel: {problem} .* {size}"):
        shard_of(model(**overrides), 0, size)


def test_weights_are_slices_of_the_files(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, num_attention_heads=8)
    whole = load_file(folder / "model.safetensors")
    prefix = "model.layers.2"
    weights = Weights(folder, torch.float32, None, shard_of(load_model_config(folder), rank=3, size=4))
    names = [f"{prefix}.self_attn.{kind}_proj.weight" for kind in "qkv"]
    query, key, value = (whole[name] for name in names)
    fused = weights.take_fused(dict(zip(names, [(32, 64), (16, 64), (16, 64)], strict=True)))
    assert torch.equal(fused, torch.cat((query[96:128], key[16:32], value[16:32])))
    output = weights.take(f"{prefix}.self_attn.o_proj.weight", 64, 32)
    assert torch.equal(output, whole[f"{prefix}.self_attn.o_proj.weight"][:, 96:128])
    assert output.is_contiguous(), "kernels take no strides"
    down = weights.take(f"{prefix}.mlp.down_proj.weight", 64, 32)
    assert torch.equal(down, whole[f"{prefix}.mlp.down_proj.weight"][:, 96:128])
    head = weights.take("lm_head.weight", 128, 64)
    assert torch.equal(head, whole["lm_head.weight"][384:512])
    norm = weights.take("model.norm.weight", 64)
    assert torch.equal(norm, whole["model.norm.weight"])


def test_a_file_whose_tensor_does_not_fit_is_told_its_whole_shape(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    config = model(intermediate_size=256)
    weights = Weights(folder, torch.float32, None, shard_of(config, 1, 2))
    with pytest.raises(ModelError, match=r"has shape \[128, 64\], expected \[256, 64\]"):
        weights.take("model.layers.0.mlp.gate_proj.weight", 128, 64)
