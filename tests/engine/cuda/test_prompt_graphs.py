"""For which numbers of tokens steps with prompts have CUDA graphs, and that these compute what the model does."""

from bisect import bisect_left
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from benchmarks.shapes import SHAPES
from engine.cuda.graph_recorder import GraphRecorder
from engine.cuda.prompt_graphs import LARGEST, PromptGraphs, layer_weights, prompt_sizes, without_graphs
from engine.cuda.triton_operations import TritonOperations
from engine.model.attention import HeadNorms
from engine.model.families.llama import Llama
from engine.model.families.registry import MODELS
from engine.model.weights import Weights
from runtime.checkpoint.model_files import resolve_model
from runtime.device.drivers import memory_of
from tests.engine.kernels.device import DEVICE, relative_error
from tests.tiny_families import write_family


def test_the_sizes_of_an_8b_model_are_few_and_from_512_tokens_on_multiples_of_a_tile() -> None:
    sizes = prompt_sizes(8192, layer_weights(SHAPES["8b"]))
    assert len(sizes) == 24
    assert sizes[sizes.index(512) :] == list(range(512, 2049, 128))


def test_steps_of_a_large_model_that_keep_the_gpu_busy_have_no_graphs() -> None:
    assert layer_weights(SHAPES["8b"]) == 192_937_984
    assert prompt_sizes(8192, layer_weights(SHAPES["8b"]))[-1] == 2048
    assert prompt_sizes(8192, layer_weights(SHAPES["0.6b"]))[-1] == LARGEST


@given(st.integers(1, 16384), st.integers(1, 10**10))
def test_at_most_a_third_of_a_step_is_padding_up_to_the_longest_one_with_graphs(max_tokens: int, weights: int) -> None:
    sizes = prompt_sizes(max_tokens, weights)
    unlimited = prompt_sizes(max_tokens, 1)
    assert sizes == sorted(set(sizes))
    assert sizes == unlimited[: len(sizes)]
    assert unlimited[-1] == min(max_tokens, LARGEST)
    for num_tokens in range(65, sizes[-1] + 1, 7):
        size = sizes[bisect_left(sizes, num_tokens)]
        assert (size - num_tokens) / size <= 1 / 3


def graphs_of(model: Llama) -> PromptGraphs:
    if DEVICE.type == "cpu":
        return PromptGraphs(model, 16, without_graphs)
    with GraphRecorder() as recorder:
        return PromptGraphs(model, 16, recorder.record)


@pytest.mark.parametrize(("family", "fp8"), [("qwen2", False), ("qwen2", True), ("olmo2", True), ("qwen3moe", False)])
@torch.inference_mode()
def test_they_compute_what_the_model_does(tmp_path: Path, family: str, fp8: bool) -> None:
    """Also what a layer leaves to the next one's norm, in the last layer, too."""
    files = resolve_model(str(write_family(tmp_path, family, num_hidden_layers=2)))
    operations = TritonOperations(torch.zeros(16, dtype=torch.int32, device=DEVICE))
    weights = Weights(files.folder, torch.float32, memory_of(DEVICE), fp8=fp8, keeps_fp8=fp8)
    model = MODELS[files.config.architecture](files.config, weights, operations)
    graphs, heads = graphs_of(model), files.config.num_heads
    token_ids = torch.tensor([5, 3, 200, 7, 9], dtype=torch.int32, device=DEVICE)
    mixed = graphs.mixed(len(token_ids))

    def attend(layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        return mixed.copy_(qkv[:, :heads])

    for _ in range(2):
        found = graphs.forward(token_ids, attend).clone()
        assert relative_error(found, model.forward(token_ids, attend)) < 1e-5
