"""What `auto` means where workers run on GPUs. No GPU is needed to choose."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from baton.service.machine_defaults import described, suited, suited_alone
from runtime.checkpoint.model_files import ModelFiles, resolve_model
from runtime.config.serving import EngineConfig, ServingConfig, for_prefill_worker, parse_config

AUTO = {
    "engine": {"block_size": "auto", "max_batch_tokens": "auto", "prefill_batch_tokens": "auto", "max_running": "auto"}
}


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
def test_a_gpu_gets_larger_blocks_and_batches_and_a_prefill_worker_larger_steps(
    large: ModelFiles, given: dict[str, Any]
) -> None:
    chosen = engine(large, given)
    assert (chosen.block_size, chosen.max_batch_tokens, chosen.max_running) == (64, 512, 256)
    prefill = for_prefill_worker(ServingConfig(engine=chosen))
    assert prefill.engine.max_batch_tokens == 8192
    assert engine(large, given, gpu=False) == EngineConfig()


def test_a_small_model_gets_larger_steps_and_none_gets_steps_beyond_its_context(small: ModelFiles) -> None:
    assert engine(small, {}).max_batch_tokens == 1024
    assert engine(small, {}).prefill_batch_tokens == 4096
    assert engine(small, {"engine": {"max_model_len": 2000}}).prefill_batch_tokens == 2000


def test_vllm_gets_large_steps_and_nothing_that_only_a_prefill_worker_takes(large: ModelFiles) -> None:
    given = {"workers": {"engine": "vllm", "prefill": 0}}
    chosen = engine(large, given)
    assert (chosen.block_size, chosen.max_batch_tokens, chosen.prefill_batch_tokens) == (64, 8192, None)


def test_what_the_user_wrote_stays_also_when_it_is_the_default(large: ModelFiles) -> None:
    given = {"engine": {"block_size": 16, "max_batch_tokens": 16384, "max_running": 64}}
    chosen = engine(large, given)
    assert (chosen.block_size, chosen.max_batch_tokens, chosen.max_running) == (16, 16384, 64)
    assert chosen.prefill_batch_tokens == 16384  # not fewer than where answers wait
    assert engine(large, {"engine": {"prefill_batch_tokens": None}}).prefill_batch_tokens is None


@pytest.mark.parametrize(
    ("wrote", "tokens"),
    [
        ({}, 8192),
        ({"max_batch_tokens": "auto"}, 8192),
        ({"max_batch_tokens": 256}, 256),
        ({"prefill_batch_tokens": 2048}, 2048),
        ({"prefill_batch_tokens": None}, 512),
    ],
)
def test_an_engine_in_a_program_takes_the_steps_of_a_prefill_worker(
    large: ModelFiles, wrote: dict[str, Any], tokens: int
) -> None:
    given = {"engine": wrote}
    assert suited_alone(parse_config(given), given, large, gpu=True).engine.max_batch_tokens == tokens


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
    assert told["prefill_batch_tokens"] == (8192 if gpu else 512)
