"""Hidden states and logits against transformers, random tiny weights, float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.model.attention import Span, StepAttention
from engine.model.families.llama import Llama
from engine.model.families.registry import MODELS
from engine.model.operations import TorchOperations
from engine.model.weights import Weights
from engine.runners.torch_attention import prepare, torch_attentions
from kvtransfer.slab.layout import SlabLayout
from runtime.checkpoint.model_files import resolve_model
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def load(folder: Path) -> Llama:
    files = resolve_model(str(folder))
    weights = Weights(files.folder, torch.float32)
    return MODELS[files.config.architecture](files.config, weights, TorchOperations())


def load_reference(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@torch.inference_mode()
def run(model: Llama, token_ids: Tensor, chunks: list[int], block_size: int) -> tuple[Tensor, Tensor]:
    """Normed hidden states and logits of one sequence that is run in chunks; chunks of 1 run as decodes."""
    config = model.config
    num_blocks = len(token_ids) // block_size + 3
    layout = SlabLayout(config.num_layers, num_blocks, config.num_kv_heads, block_size, config.head_dim, "float32")
    slab, table = torch.full(layout.shape, 5.0), torch.randperm(num_blocks).tolist()
    attentions = torch_attentions(config, layout, torch.float32, CPU)
    hidden, start = [], 0
    for size in chunks:
        span = [Span(start, start + size, table)]
        prefill, decode = (span, []) if size > 1 else ([], span)
        layers = prepare(attentions, [layer.sinks for layer in model.layers], prefill, decode)
        step = StepAttention(layers, slab, size if size > 1 else 0, None)
        hidden.append(model.forward(token_ids[start : start + size], step))
        start += size
    assert start == len(token_ids)
    return torch.cat(hidden), model.logits(torch.cat(hidden))


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def compare(folder: Path, length: int, chunks: list[int], block_size: int = 16) -> None:
    reference, model = load_reference(folder), load(folder)
    token_ids = torch.randint(VOCAB_SIZE, (length,))
    seen: list[Tensor] = []
    reference.model.layers[-1].register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.inference_mode():
        expected = reference(token_ids[None]).logits[0]
    hidden, logits = run(model, token_ids, chunks, block_size)
    assert relative_error(hidden, seen[0][0]) < 1e-5
    assert relative_error(logits, expected) < 1e-5
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_transformers(tmp_path: Path, architecture: str, block_size: int, tied: bool) -> None:
    torch.manual_seed(block_size)
    folder = write_tiny_model(tmp_path, architecture=architecture, tie_word_embeddings=tied)
    compare(folder, 200, [50, 1, 77, 64, *[1] * 8], block_size)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_head_size_of_its_own_and_full_attention_heads(tmp_path: Path, architecture: str) -> None:
    torch.manual_seed(1)
    folder = write_tiny_model(tmp_path, architecture=architecture, head_dim=32, num_key_value_heads=4)
    compare(folder, 60, [40, 17, 1, 1, 1])


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_rope_scaling_equals_transformers(tmp_path: Path, key: str) -> None:
    torch.manual_seed(2)
    scaling: dict[str, Any] = LLAMA3 | ({"rope_theta": 5e5} if key == "rope_parameters" else {})
    compare(write_tiny_model(tmp_path, rope_theta=5e5, **{key: scaling}), 600, [300, 299, 1])


def test_llama3_rope_scaling_makes_a_difference(tmp_path: Path) -> None:
    token_ids = torch.arange(3, 203)
    plain, scaled = (
        run(load(write_tiny_model(tmp_path / name, **overrides)), token_ids, [200], 16)[1]
        for name, overrides in (("plain", {}), ("scaled", {"rope_scaling": LLAMA3}))
    )
    assert relative_error(scaled, plain) > 0.01


def test_bfloat16_and_sharded_files_serve_in_float32(tmp_path: Path) -> None:
    torch.manual_seed(3)
    folder = write_tiny_model(tmp_path, architecture="qwen3")
    weights = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, of_file in shards.items():
        save_file({name: weights[name] for name in of_file}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, of_file in shards.items() for name in of_file}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    compare(folder, 40, [39, 1])
