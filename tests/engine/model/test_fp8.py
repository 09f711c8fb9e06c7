"""Weights that stay in 8 bits: what they stand for is what weights of the products are, whoever holds which part."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.shapes import SHAPES
from engine.model.checkpoint import Checkpoint
from engine.model.families.registry import MODELS
from engine.model.fp8_matrix import F8_MAX, Fp8Matrix, Weight, rounded
from engine.model.operations import TorchOperations
from engine.model.random_weights import RandomWeights
from engine.model.shard import Shard, shard_of
from engine.model.weights import Weights
from runtime.checkpoint.model_config import load_model_config
from runtime.device.host_memory import HostMemory
from runtime.errors import ModelError
from tests.engine.model import test_scaled_tensors as checkpoints
from tests.tiny_families import write_family


def kept(folder: Path, shard: Shard | None = None) -> Weights:
    return Weights(folder, torch.float32, HostMemory(), shard, fp8=True, keeps_fp8=True)


def matrices(folder: Path, weights: Weights, rank: int = 0, size: int = 1) -> list[Weight]:
    """Of all layers: queries, keys and values; outputs; gates and ups; downs. weights: of that rank."""
    shard = shard_of(load_model_config(folder), rank, size)
    layers = MODELS[shard.model.architecture](shard.config, weights, TorchOperations(), shard.vocabulary).layers
    mlps = [(layer.gate_up, layer.down) for layer in layers if hasattr(layer, "gate_up")]
    mlps += [(layer.experts.gates_ups, layer.experts.downs) for layer in layers if hasattr(layer, "experts")]
    return [
        *(matrix for layer in layers for matrix in (layer.qkv, layer.output)),
        *(one for mlp in mlps for one in mlp),
    ]


def products(weights: list[Weight]) -> list[Tensor]:
    return [weight.products() if isinstance(weight, Fp8Matrix) else weight for weight in weights]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(1)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", checkpoints.CASES)
def test_a_checkpoints_own_numbers_are_kept(tmp_path: Path, case: str, ranks: int) -> None:
    quantized, plain = checkpoints.write(tmp_path, case)
    for rank in range(ranks):
        shard = shard_of(load_model_config(quantized), rank, ranks)
        weights = kept(quantized, shard)
        found = matrices(quantized, weights, rank, ranks)
        assert all(isinstance(one, Fp8Matrix) for one in found)
        expected = matrices(plain, Weights(plain, torch.float32, shard=shard), rank, ranks)
        assert_equal(products(found), expected)
        for one in found:
            one.values.zero_()
        weights.reload()
        assert_equal(products(found), expected)


@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_ranks_have_parts_of_what_one_rank_rounds(tmp_path: Path, family: str) -> None:
    folder = write_family(tmp_path, {"llama": "mistral"}.get(family, family))
    config = load_model_config(folder)
    whole = matrices(folder, kept(folder, shard_of(config, 0, 1)))
    parts = [matrices(folder, kept(folder, shard_of(config, rank, 2)), rank, 2) for rank in range(2)]
    outputs = range(1, 2 * config.num_layers, 2)
    for index in outputs:
        assert torch.equal(torch.cat([products(part)[index] for part in parts], 1), products(whole)[index])
    first, second = (products(part)[-1] for part in parts)
    assert torch.equal(torch.cat((first, second), -1), products(whole)[-1])


def test_a_cpu_computes_with_the_values_that_a_gpu_keeps_in_8_bits(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "mistral")
    plain, on_cpu = (matrices(folder, Weights(folder, torch.float32, fp8=fp8)) for fp8 in (False, True))
    assert_equal(products(matrices(folder, kept(folder))), on_cpu)
    for before, after in zip(plain, on_cpu, strict=True):
        assert 0.01 < float((after - before).norm() / before.norm()) < 0.04
    names = [Weights(folder, torch.float32, fp8=fp8).fingerprint() for fp8 in (False, True)]
    assert names[0] != names[1], "KV of one is not KV of the other"


def test_other_weights_are_rounded_as_those_before(tmp_path: Path) -> None:
    """From a folder, and tensor by tensor."""
    first, second = (write_family(tmp_path / str(seed), "mistral", seed) for seed in (1, 2))
    shard = shard_of(load_model_config(first), 1, 2)
    expected = products(matrices(second, kept(second, shard), 1, 2))
    weights = kept(first, shard)
    held = matrices(first, weights, 1, 2)
    weights.begin_update()
    for name, tensor in Checkpoint(second).tensors():
        weights.check(name, tensor)
        weights.replace(name, tensor)
    weights.end_update()
    assert_equal(products(held), expected)
    weights.read(Checkpoint(first))
    assert not torch.equal(products(held)[0], expected[0])
    weights.read(Checkpoint(second))
    assert_equal(products(held), expected)


def test_matrices_of_one_product_have_one_kind_of_scales(tmp_path: Path) -> None:
    quantized, _ = checkpoints.write(tmp_path, "blocks'")
    tensors = checkpoints.load_file(quantized / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = torch.randn(tensors[name].shape)
    del tensors[f"{name}_scale_inv"]
    checkpoints.save(tensors, quantized)
    with pytest.raises(
        ModelError, match=r"fp8 needs tensors that are multiplied together in blocks of one size: .*k_proj"
    ):
        matrices(quantized, kept(quantized))


def test_numbers_are_divided_by_the_largest_of_their_group() -> None:
    numbers = torch.randn(6, 64) * torch.logspace(-6, 3, 6)[:, None]
    numbers[3] = 0.0
    for group in (32, 64):
        matrix = rounded(numbers, group)
        assert matrix.scales.shape == (6, 64 // group)
        assert matrix.values.float().abs().amax(1).tolist() == [F8_MAX, F8_MAX, F8_MAX, 0.0, F8_MAX, F8_MAX]
        assert ((matrix.products() - numbers).abs() <= numbers.abs() / 16 + matrix.scales.amax() / 1024).all()


def test_random_weights_in_8_bits_take_half_the_memory() -> None:
    config = replace(SHAPES["0.6b"], vocab_size=1000, num_layers=2)
    sizes = []
    for fp8 in (False, True):
        weights = RandomWeights(Shard(config, 0, 1), torch.bfloat16, HostMemory(), fp8=fp8)
        model = MODELS[config.architecture](config, weights, TorchOperations())
        assert weights.memory is not None
        sizes.append(weights.memory.nbytes)
        deviation = float(products([model.layers[0].down])[0].float().std())
        assert deviation == pytest.approx(config.intermediate_size**-0.5, rel=0.1)
    assert sizes[1] < 0.6 * sizes[0]
