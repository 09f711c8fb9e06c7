"""What `auto` means where workers run on GPUs. No GPU is needed to choose."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from baton.service.wanted.machine_defaults import described, suited
from runtime.checkpoint.model_files import ModelFiles, resolve_model
from runtime.config.serving import EngineConfig, ServingConfig, parse_config

AUTO = {"engine": {"block_size": "auto", "max_batch_tokens": "auto", "max_running": "auto"}}


@pytest.fixture
def small(tiny_model: Path) -> ModelFiles:
    return resolve_model(str(tiny_model))


@pytest.fixture
def large(small: ModelFiles) -> ModelFiles:
    """A model of the shape of an 8B one, as far as it matters here."""
    return dataclasses.replace(
        small, config=dataclasses.replace(small.config, hidden_size=4096, max_position=40960, dtype="bfloat16")
    )


def engine(files: ModelFiles, given: dict[str, Any], *, gpu: bool = True) -> EngineConfig:
    return suited(parse_config(given), given, files, gpu=gpu).engine


@pytest.mark.parametrize("given", [{}, AUTO], ids=["left out", "auto"])
def test_a_gpu_gets_larger_blocks_and_more_sequences(large: ModelFiles, given: dict[str, Any]) -> None:
    chosen = engine(large, given)
    assert (chosen.block_size, chosen.max_batch_tokens, chosen.max_running) == (64, 8192, 256)
    assert engine(large, given, gpu=False) == EngineConfig()


def test_no_step_is_larger_than_the_models_context(small: ModelFiles) -> None:
    assert engine(small, {}).max_batch_tokens == 4096
    assert engine(small, {"engine": {"max_model_len": 2000}}).max_batch_tokens == 2000


def test_what_the_user_wrote_stays_also_when_it_is_the_default(large: ModelFiles) -> None:
    given = {"engine": {"block_size": 16, "max_batch_tokens": 16384, "max_running": 64}}
    chosen = engine(large, given)
    assert (chosen.block_size, chosen.max_batch_tokens, chosen.max_running) == (16, 16384, 64)


@pytest.mark.parametrize(
    ("published", "gpu", "dtype"),
    [("float32", True, "bfloat16"), ("float16", True, "float16"), ("bfloat16", False, "float32")],
)
def test_what_is_told_names_the_dtype_that_will_be_served(
    large: ModelFiles, published: str, gpu: bool, dtype: str
) -> None:
    files = dataclasses.replace(large, config=dataclasses.replace(large.config, dtype=published))
    told = described(suited(ServingConfig(), {}, files, gpu=gpu), files, gpu=gpu)
    assert (told["dtype"], told["device"]) == (dtype, "cuda" if gpu else "cpu")
