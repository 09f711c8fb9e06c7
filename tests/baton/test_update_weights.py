"""Weights from outside: a model whose weights were replaced answers as one that was loaded with them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from baton import LLM, SamplingParams
from runtime.errors import ConfigError, InvalidRequestError, ModelError, UnavailableError
from tests.service import NEEDS_TWO, ON_DEVICE
from tests.spine.prompts import random_prompt
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = ON_DEVICE | {"kv_memory": "4MiB", "max_model_len": 1024, "block_size": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [random_prompt(50, seed=1), random_prompt(7, seed=2)]


def tokens(llm: LLM) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(PROMPTS, GREEDY)]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    return write_tiny_model(tmp_path / "old"), write_tiny_model(tmp_path / "new", seed=1)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=NEEDS_TWO)])
@pytest.mark.parametrize("kind", [{"architecture": "llama"}, {"architecture": "qwen3", "tie_word_embeddings": True}])
def test_replaced_weights_answer_as_loaded_ones(tmp_path: Path, kind: dict[str, Any], ranks: int) -> None:
    old, new = write_tiny_model(tmp_path / "old", **kind), write_tiny_model(tmp_path / "new", seed=1, **kind)
    with LLM(new, **SMALL) as loaded:
        expected = tokens(loaded)
    given = tensors(new)
    if kind.get("tie_word_embeddings"):
        given["lm_head.weight"] = given["model.embed_tokens.weight"]  # as in a state_dict
    on_disk = (old / "model.safetensors").read_bytes()
    with LLM(old, **SMALL, tensor_parallel=ranks) as llm:
        before = tokens(llm)
        assert before != expected
        llm.update_weights((name, torch.nn.Parameter(tensor)) for name, tensor in given.items())
        assert tokens(llm) == expected
        llm.update_weights(tensors(old))  # a mapping, as a state_dict is one
        assert tokens(llm) == before
    assert (old / "model.safetensors").read_bytes() == on_disk


@pytest.mark.parametrize("given", ["model.safetensors", None, 3])
def test_what_cannot_be_tensors_is_refused_by_its_type(folders: tuple[Path, Path], given: Any) -> None:
    with LLM(folders[0], **SMALL) as llm:
        before = tokens(llm)
        with pytest.raises(InvalidRequestError, match=r"tensors: must be pairs \(name, tensor\), not "):
            llm.update_weights(given)
        assert tokens(llm) == before


def test_prefixes_are_forgotten_and_the_fingerprint_is_another(folders: tuple[Path, Path]) -> None:
    with LLM(folders[0], **SMALL) as llm:
        tokens(llm)
        assert llm.generate(PROMPTS, GREEDY)[0].cached_tokens == 48
        seen = {llm._answers.memory.fingerprint}
        for _ in range(2):
            llm.update_weights(tensors(folders[1]).items())
            assert [one.cached_tokens for one in llm.generate(PROMPTS, GREEDY)] == [0, 0]
            seen.add(llm._answers.memory.fingerprint)
    assert len(seen) == 3


def test_what_does_not_fit_is_named(folders: tuple[Path, Path]) -> None:
    with LLM(folders[0], **SMALL) as llm:
        before, given = tokens(llm), tensors(folders[1])
        for name, tensor, problem in (
            ("model.embedding", torch.zeros(2), "tensor model.embedding is not known to this architecture"),
            ("model.norm.weight", torch.zeros(63), r"tensor model.norm.weight has shape \[63\], expected \[64\]"),
            ("model.norm.weight", torch.zeros(64, dtype=torch.int8), "has dtype torch.int8, expected floating-point"),
        ):
            with pytest.raises(ModelError, match=problem):
                llm.update_weights([(name, tensor)])
        assert tokens(llm) == before, "nothing was replaced"
        left_out = given.pop("model.layers.2.self_attn.k_proj.weight")
        with pytest.raises(ModelError, match=r"1 tensors are missing: model\.layers\.2\.self_attn\.k_proj\.weight"):
            llm.update_weights(given.items())
        with pytest.raises(UnavailableError, match="only some tensors are replaced: update the weights again"):
            tokens(llm)
        llm.update_weights([*given.items(), ("model.layers.2.self_attn.k_proj.weight", left_out)])
        with LLM(folders[1], **SMALL) as loaded:
            assert tokens(llm) == tokens(loaded)


def test_nothing_is_answered_while_weights_are_replaced(folders: tuple[Path, Path]) -> None:
    with LLM(folders[0], **SMALL) as llm:
        stream = llm.stream("a", SamplingParams(max_tokens=900, ignore_eos=True))
        next(stream)
        with pytest.raises(UnavailableError, match="prompts are being answered"):
            llm.update_weights([])

        def slowly() -> Iterator[tuple[str, torch.Tensor]]:
            yield from tensors(folders[1]).items()
            for forbidden in (lambda: llm.generate("a"), llm.sleep, lambda: llm.update_weights([])):
                with pytest.raises(UnavailableError, match="the weights are being updated"):
                    forbidden()

        stream.close()  # type: ignore[attr-defined]
        llm.update_weights(slowly())
        assert tokens(llm)


def test_weights_of_which_a_disk_tier_holds_kv_are_not_replaced(tmp_path: Path) -> None:
    disk = {"folder": str(tmp_path), "size": "1GiB"}
    refused = pytest.raises(ConfigError, match="disk_kv: its files are named by the weights")
    with LLM("smollm2", kv_memory="64MiB", host_kv_memory="64MiB", disk_kv=disk) as llm, refused:
        llm.update_weights([])
