"""Models with sliding windows, whose KV cache vLLM keeps in other groups: answers are exact, prefixes are found where a
layer sees whole prompts, and what is not found or not shared is said."""

import asyncio
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.errors import BatonError
from tests.service import Service, running_service
from tests.spine.oracle import Oracle
from tests.spine.prompts import random_prompt
from tests.spine.worker_view import POLL_S, until_idle, until_tree_is_right
from tests.tiny_model import VOCAB_SIZE, write_tiny_model
from tests.vllm.environment import LIMIT_S, PATIENCE_S
from tests.vllm.test_workers import BLOCK, ask, sections

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(LIMIT_S)]

WINDOW = 64
LONG = 6 * BLOCK


def write_tiny_mistral(folder: Path) -> Path:
    """All layers slide."""
    changes: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return write_tiny_model(folder, sliding_window=WINDOW, head_dim=32, **changes)


def write_tiny_gemma(folder: Path) -> Path:
    """Three layers slide, and the fourth sees the whole prompt."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        write_tiny_model(folder)
        torch.manual_seed(0)
        shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 32}
        heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = Gemma3TextConfig(
            vocab_size=VOCAB_SIZE,
            sliding_window=WINDOW,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
            max_position_embeddings=2048,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            **shape,
            **heads,
        )
        Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


def small(python: Path) -> dict[str, Any]:
    return sections(python) | {"engine": {"block_size": BLOCK, "kv_memory": "64MiB", "max_model_len": 1024}}


async def answers_are_exact(service: Service, folder: Path) -> None:
    oracle = Oracle(folder)
    for length in (1, 33, WINDOW + 1, LONG + 5):
        prompt = random_prompt(length, seed=length)
        answer = await ask(service, prompt, 40, ignore_eos=True)
        assert answer.token_ids == oracle.greedy(prompt, 40, ignore_eos=True, guess=answer.token_ids)


async def test_prefixes_of_a_model_with_some_sliding_layers_are_found(vllm_python: Path, tmp_path: Path) -> None:
    folder = write_tiny_gemma(tmp_path / "tiny-gemma")
    async with running_service(folder, 0, 1, **small(vllm_python)) as service:
        await answers_are_exact(service, folder)
        prompt = random_prompt(LONG, seed=50)
        await ask(service, prompt, 1)
        await until_idle(service, PATIENCE_S)
        await until_tree_is_right(service, PATIENCE_S)
        (worker,) = (await service.client.status(PATIENCE_S)).workers
        assert (worker.note, worker.blocks_in_tree > LONG // BLOCK) == ("", True)
        again = await ask(service, [*prompt, 5], 1)
        assert again.usage.cached_tokens >= LONG - WINDOW
    log = service.log("decode-1")
    assert "blocks that routers will not find" not in log


async def test_a_model_whose_layers_all_slide_is_served_and_status_says_what_is_not_found(
    vllm_python: Path, tmp_path: Path
) -> None:
    folder = write_tiny_mistral(tmp_path / "tiny-mistral")
    async with running_service(folder, 0, 1, **small(vllm_python)) as service:
        await answers_are_exact(service, folder)
        await until_idle(service, PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            while not (worker := (await service.client.status(PATIENCE_S)).workers[0]).note:
                await asyncio.sleep(POLL_S)  # it is told once a second
        assert worker.note == (
            "its prefixes are not found: its KV events tell of sliding_window alone, not of full attention"
        )
        assert worker.blocks_in_tree == 0


async def test_a_cache_that_cannot_be_shared_is_refused_at_the_start(vllm_python: Path, tmp_path: Path) -> None:
    folder = write_tiny_mistral(tmp_path / "tiny-mistral")
    with pytest.raises(BatonError, match=r"workers\.prefill: vLLM keeps the KV of this model as SlidingWindowSpec"):
        async with running_service(folder, 1, 1, **small(vllm_python)):
            pass
