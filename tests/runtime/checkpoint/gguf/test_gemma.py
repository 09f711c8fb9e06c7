"""Gemma's GGUF files against transformers with the checkpoint that they are made of."""

from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from runtime.checkpoint.families import FAMILIES
from runtime.checkpoint.gguf.convert import convert, layer_tensors
from runtime.checkpoint.model_config import load_model_config
from runtime.errors import ModelError
from tests.engine.model.test_models import load, load_reference, relative_error, run
from tests.runtime.checkpoint.gguf.test_gguf import add_tokenizer
from tests.tiny_families import write_family
from tests.tiny_model import VOCAB_SIZE

NUM_LAYERS = 7
SCALED = {"gemma2.attn_logit_softcapping": 50.0, "gemma2.final_logit_softcapping": 30.0}
SHOWN = {"gemma2": SCALED, "gemma3": {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}}


def write_gguf(path: Path, source: Path, architecture: str, metadata: dict[str, float | str]) -> None:
    """As llama.cpp's converter has it: weights of norms are larger by one."""
    config = load_model_config(source)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    for key, value in metadata.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    add_tokenizer(writer, path.parent)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    for layer in range(NUM_LAYERS):
        tensors = layer_tensors(FAMILIES[architecture])
        names |= {f"model.layers.{layer}.{ours}": f"blk.{layer}.{theirs}" for theirs, ours in tensors.items()}
    for name, values in load_file(source / "model.safetensors").items():
        stored = values + 1 if name.endswith("norm.weight") else values
        writer.add_tensor(f"{names[name.removesuffix('.weight')]}.weight", stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", SHOWN)
def test_logits_equal_those_of_the_checkpoint(tmp_path: Path, architecture: str) -> None:
    source = write_family(
        tmp_path / "source", architecture, num_hidden_layers=NUM_LAYERS, query_pre_attn_scalar=16, layer_types=None
    )
    path, folder = tmp_path / "m.gguf", tmp_path / "converted"
    folder.mkdir()
    write_gguf(path, source, architecture, SHOWN[architecture] | {f"{architecture}.attention.sliding_window": 24})
    convert(path, folder, progress=False)
    tokens = torch.randint(VOCAB_SIZE, (100,))
    logits = run(load(folder), tokens, [60, 39, 1], 16)[1]
    with torch.inference_mode():
        expected = load_reference(source)(tokens[None]).logits[0]
    assert relative_error(logits, expected) < 1e-5


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    source = write_family(tmp_path / "source", "gemma2", num_hidden_layers=NUM_LAYERS, layer_types=None)
    write_gguf(tmp_path / "m.gguf", source, "gemma2", {"gemma2.attention.sliding_window": 24})
    with pytest.raises(ModelError, match=r"its metadata lacks gemma2\.attn_logit_softcapping"):
        convert(tmp_path / "m.gguf", tmp_path, progress=False)
