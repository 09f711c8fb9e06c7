"""Every family against transformers: hidden states and logits, random tiny weights, float32."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.loading.model_memory import ModelMemory
from engine.model.families.registry import MODELS
from engine.model.operations import TorchOperations
from engine.model.shard import shard_of
from engine.model.weights import Weights
from runtime.checkpoint.model_files import resolve_model
from runtime.errors import ModelError
from tests.engine.model.test_models import compare, load, run
from tests.tiny_families import CASES, write_family
from tests.tiny_model import VOCAB_SIZE


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_and_logits_equal_those_of_transformers(tmp_path: Path, case: str) -> None:
    """In chunks and decodes, beyond windows and original contexts."""
    torch.manual_seed(1)
    compare(write_family(tmp_path, case), 200, [50, 1, 77, 64, *[1] * 8])


def test_tensors_that_are_several_of_ours_are_replaced_as_a_checkpoint_and_one_by_one(tmp_path: Path) -> None:
    """Phi-3's queries, keys and values are one tensor, and so are gate and up."""
    old, new = (write_family(tmp_path / str(seed), "phi3", seed) for seed in (0, 1))
    files = resolve_model(str(old))
    tokens = torch.randint(VOCAB_SIZE, (30,))
    expected = run(load(new), tokens, [30], 16)[1]
    for how in ("checkpoint", "tensors"):
        weights = Weights(files.folder, torch.float32, shard=shard_of(files.config, 0, 1))
        model = MODELS["phi3"](files.config, weights, TorchOperations())
        assert not torch.equal(run(model, tokens, [30], 16)[1], expected)
        memory = ModelMemory(weights, None)  # type: ignore[arg-type]  # no slab
        if how == "checkpoint":
            memory.read(memory.opened(new))
        else:
            memory.update(load_file(new / "model.safetensors").items())
        torch.testing.assert_close(run(model, tokens, [30], 16)[1], expected)
    broken = load_file(new / "model.safetensors")
    name = "model.layers.1.self_attn.qkv_proj.weight"
    broken[name] = broken[name][:-1].contiguous()
    with pytest.raises(ModelError, match=rf"tensor {name} has shape \[127\], expected \[128\]"):
        memory.update(broken.items())
    save_file(broken, new / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"tensor {name} has shape \[127, 64\], expected 128 rows"):
        load(new)
