"""Checkpoints of 8-bit numbers against transformers with the products: random tiny weights, float32."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.model.shard import shard_of
from engine.model.weights import Weights
from runtime.checkpoint.model_config import load_model_config
from runtime.errors import ModelError
from tests.engine.model.test_models import load, load_reference, relative_error, run
from tests.tiny_families import write_family
from tests.tiny_model import VOCAB_SIZE

BLOCK = (48, 32)  # neither divides all matrices
F8 = torch.float8_e4m3fn
FP8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
GROUP = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}, "targets": ["Linear"]}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": GROUP}}

MXFP4 = "groups of 4 bits"


def of_tensor(values: Tensor) -> tuple[Tensor, Tensor]:
    return values.abs().max() / 448, torch.ones_like(values)


def of_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    return values.abs().amax(1, keepdim=True) / 448, torch.ones_like(values)


def of_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Random scales, and which one each value has."""
    rows, columns = (torch.arange(size) // of for size, of in zip(values.shape, BLOCK, strict=True))
    scales = torch.rand(int(rows[-1]) + 1, int(columns[-1]) + 1) / 100 + 0.01
    return scales, scales[rows][:, columns]


CASES: dict[str, tuple[str, dict[str, Any], str, Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    "a tensor's": ("ministral", FP8, "weight_scale_inv", of_tensor),
    "blocks'": ("qwen3moe", FP8 | {"weight_block_size": list(BLOCK)}, "weight_scale_inv", of_blocks),
    "rows'": ("phi3", COMPRESSED, "weight_scale", of_rows),
}


def write_mxfp4(folder: Path) -> tuple[Path, Path]:
    """gpt-oss with random numbers of 4 bits, and with the products as transformers has them."""
    products, quantized = (write_family(folder / name, "gpt-oss") for name in ("products", "quantized"))
    tensors = load_file(products / "model.safetensors")
    fours = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = fours.pop(name).shape
        fours[f"{name}_blocks"] = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        fours[f"{name}_scales"] = torch.randint(122, 126, (experts, rows, columns // 32), dtype=torch.uint8)
        pair = fours[f"{name}_blocks"], fours[f"{name}_scales"]
        tensors[name] = convert_moe_packed_tensors(*pair, dtype=torch.float32).contiguous()
    save(tensors, products)
    save(fours, quantized, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return quantized, products


def save(tensors: dict[str, Tensor], folder: Path, config: dict[str, Any] | None = None) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    keys = json.loads((folder / "config.json").read_text()) | ({"quantization_config": config} if config else {})
    (folder / "config.json").write_text(json.dumps(keys))


def write(folder: Path, case: str) -> tuple[Path, Path]:
    """A folder with scales, and one with the products."""
    if case == MXFP4:
        return write_mxfp4(folder)
    family, config, end, scaling = CASES[case]
    products, quantized = write_family(folder / "products", family), write_family(folder / "quantized", family)
    tensors, eights = load_file(products / "model.safetensors"), {}
    for name, values in tensors.items():
        if not name.endswith("proj.weight") or "embed" in name:
            eights[name] = values
            continue
        scale, spread = scaling(values)
        factors = spread if scaling is of_blocks else scale * spread
        eights[name] = (values / factors).clamp(-448, 448).to(F8)
        eights[name.replace("weight", end)] = scale
        eights[name.replace("weight", "input_scale")] = torch.tensor(1.0)
        tensors[name] = eights[name].float() * factors
    save(tensors, products)
    save(eights, quantized, config)
    return quantized, products


@pytest.mark.parametrize("case", [*CASES, MXFP4])
def test_a_model_computes_with_the_products(tmp_path: Path, case: str) -> None:
    torch.manual_seed(0)
    quantized, products = write(tmp_path, case)
    tokens = torch.randint(VOCAB_SIZE, (60,))
    logits = run(load(quantized), tokens, [40, 19, 1], 16)[1]
    with torch.inference_mode():
        expected = load_reference(products)(tokens[None]).logits[0]
    assert relative_error(logits, expected) < 1e-5
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("case", [*CASES, MXFP4])
def test_ranks_have_their_parts_of_the_products_also_after_a_sleep(tmp_path: Path, case: str) -> None:
    quantized, products = write(tmp_path, case)
    shard = shard_of(load_model_config(quantized), 1, 2)
    first, second = (Weights(folder, torch.float32, shard=shard) for folder in (quantized, products))
    prefix = "model.layers.1.self_attn"
    names = {
        f"{prefix}.q_proj.weight": (32, 64),
        f"{prefix}.k_proj.weight": (16, 64),
        f"{prefix}.v_proj.weight": (16, 64),
    }
    pairs = [[one.take_fused(names), one.take(f"{prefix}.o_proj.weight", 64, 32)] for one in (first, second)]
    if case == MXFP4:
        experts = {"gate_up_proj": (6, 64, 128), "down_proj": (6, 64, 64)}
        for pair, one in zip(pairs, (first, second), strict=True):
            pair += [one.take(f"model.layers.1.mlp.experts.{name}", *shape) for name, shape in experts.items()]
    for _ in range(2):
        for ours, theirs in zip(*pairs, strict=True):
            torch.testing.assert_close(ours, theirs)
            ours.zero_()
        (quantized / "model.safetensors").touch()
        first.reload()


NAME = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({f"{NAME}_scale_inv": None}, f"tensor {NAME} has 0 scales, expected one"),
        ({f"{NAME}_scale_inv": torch.ones(2, 2)}, rf"the scale of tensor {NAME} has shape \[2, 2\]"),
        ({NAME: torch.ones(64, 64, dtype=torch.uint8)}, f"tensor {NAME} has shape .* expected a matrix of fp8"),
        ({"k_scale": torch.ones(1)}, "1 tensors are not known to this architecture: k_scale"),
    ],
)
def test_a_scale_that_does_not_fit_is_named(tmp_path: Path, changed: dict[str, Tensor | None], problem: str) -> None:
    quantized, _ = write(tmp_path, "a tensor's")
    file = quantized / "model.safetensors"
    tensors = {name: tensor for name, tensor in (load_file(file) | changed).items() if tensor is not None}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=problem):
        load(quantized)


def test_eight_bits_without_scales_replace_no_weights(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "ministral")
    weights = Weights(folder, torch.float32)
    weights.take(NAME, 64, 64)
    with pytest.raises(ModelError, match=rf"tensor {NAME} has dtype torch.float8_e4m3fn"):
        weights.check(NAME, torch.zeros(64, 64).to(F8))
