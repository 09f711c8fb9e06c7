import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from benchmarks.shapes import SHAPES
from engine.model.families.registry import MODELS
from engine.model.operations import TorchOperations
from engine.model.random_weights import RandomWeights
from engine.model.shard import Shard
from engine.model.weights import Weights
from runtime.checkpoint.fingerprint import fingerprint
from runtime.device.host_memory import HostMemory
from runtime.errors import ModelError

FUSED = {"q": (4, 8), "k": (2, 8), "v": (2, 8)}


def tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in FUSED.items()}


def write_in_order(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """A .safetensors file whose data lies in the order of `arrays`."""
    header, at = {}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    encoded = json.dumps(header).encode().ljust(512)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(map(np.ndarray.tobytes, arrays.values())))


def open_weights(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return Weights(folder, dtype)


def test_neighbours_are_fused_into_a_view_of_the_file(tmp_path: Path) -> None:
    arrays = tensors()
    write_in_order(tmp_path / "model.safetensors", arrays)
    fused = open_weights(tmp_path).take_fused(FUSED)
    np.testing.assert_array_equal(fused.numpy(), np.concatenate(list(arrays.values())))
    assert fused.untyped_storage().nbytes() == (tmp_path / "model.safetensors").stat().st_size


@pytest.mark.parametrize("order", [["k", "q", "v"], ["q", "v", "k"]])
def test_tensors_that_lie_apart_are_fused_by_copying(tmp_path: Path, order: list[str]) -> None:
    arrays = tensors()
    write_in_order(tmp_path / "model.safetensors", {name: arrays[name] for name in order})
    fused = open_weights(tmp_path).take_fused(FUSED)
    np.testing.assert_array_equal(fused.numpy(), np.concatenate(list(arrays.values())))


def test_a_file_whose_data_is_not_aligned_is_read(tmp_path: Path) -> None:
    array = tensors()["q"]
    header = json.dumps({"q": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}}).encode()
    header = header.ljust(len(header) + (-len(header)) % 4 + 1)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + array.tobytes())
    np.testing.assert_array_equal(open_weights(tmp_path).take("q", 4, 8).numpy(), array)


def test_another_dtype_is_converted(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    assert open_weights(tmp_path, torch.bfloat16).take("q", 4, 8).dtype == torch.bfloat16


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    with pytest.raises(ModelError, match="tensor lm_head is missing"):
        weights.take("lm_head", 4, 8)
    with pytest.raises(ModelError, match=r"tensor q has shape \[4, 8\], expected \[8, 4\]"):
        weights.take("q", 8, 4)


def test_what_the_model_did_not_take_is_named(tmp_path: Path) -> None:
    buffer = {"layers.0.rotary_emb.inv_freq": np.zeros(2, np.float32), "tied": np.zeros(2, np.float32)}
    save_file(tensors() | buffer, tmp_path / "model.safetensors")
    weights = open_weights(tmp_path)
    weights.take("q", 4, 8)
    with pytest.raises(ModelError, match="2 tensors are not known to this architecture: k, v"):
        weights.finish(ignored=["tied"])
    weights.take_fused({"k": (2, 8), "v": (2, 8)})
    weights.finish(ignored=["tied"])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\n",
        (2**40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"{\xff}}",
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},
        {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]},
        {"dtype": "I8", "shape": [16], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4]},
        {"dtype": "F32", "shape": "four", "data_offsets": [0, 16]},
    ],
)
def test_a_header_that_contradicts_the_file_is_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    header = json.dumps({"a": fields}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ModelError, match="is not a safetensors file that can be used"):
        open_weights(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_memory_of_their_own_the_weights_are_copied_into_it(tmp_path: Path, dtype: torch.dtype) -> None:
    arrays = tensors()
    write_in_order(tmp_path / "model.safetensors", {name: arrays[name] for name in ("k", "q", "v")})
    weights = Weights(tmp_path, dtype, HostMemory())
    fused = weights.take_fused(FUSED)
    assert weights.memory is not None
    held = weights.memory.bytes()
    assert held.data_ptr() <= fused.data_ptr() < held.data_ptr() + len(held)
    expected = torch.from_numpy(np.concatenate(list(arrays.values()))).to(dtype)
    assert torch.equal(fused, expected)


@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_take_as_much_memory_as_the_model_wants(tied: bool) -> None:
    small = replace(SHAPES["0.6b"], vocab_size=1000, hidden_size=256, num_layers=2, tie_word_embeddings=tied)
    weights = RandomWeights(Shard(small, 0, 1), torch.float32, HostMemory())
    model = MODELS[small.architecture](small, weights, TorchOperations())
    assert weights.memory is not None
    page = HostMemory.granularity
    held = weights.memory.bytes()
    last = model.norm if tied else model.head
    assert 0 <= held.data_ptr() + len(held) - (last.data_ptr() + last.nbytes) < page
    assert abs(float(model.norm.mean()) - 1) < 0.1
    assert float(model.layers[0].down.std()) == pytest.approx(small.intermediate_size**-0.5, rel=0.1)


def test_a_fingerprint_sees_one_bit_anywhere_and_nothing_but_the_files(tmp_path: Path) -> None:
    for name in ("one", "same", "other"):
        (tmp_path / name).mkdir()
        save_file({"q": np.zeros((4096, 1024), np.float32)}, tmp_path / name / "model.safetensors")
    file = tmp_path / "other" / "model.safetensors"
    with file.open("r+b") as writable:
        writable.seek(400_000)  # between two of the samples that name a file
        writable.write(b"\x01")
    assert fingerprint(file) == fingerprint(tmp_path / "one" / "model.safetensors")
    one, same, other = (open_weights(tmp_path / name).fingerprint() for name in ("one", "same", "other"))
    assert one == same != other
