"""What only a fleet with vLLM can do: serve a model that our own engine has not, and serve one together with it."""

import asyncio
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.checkpoint.model_files import resolve_model
from runtime.errors import ModelError
from tests.service import Service, running_service
from tests.spine.oracle import Oracle
from tests.spine.prompts import greedy, random_prompt
from tests.spine.worker_view import until_gone, until_idle, until_tree_is_right
from tests.tiny_model import VOCAB_SIZE, write_tiny_model
from tests.vllm.environment import LIMIT_S, PATIENCE_S
from tests.vllm.mid_stream import killed_in_mid_stream
from tests.vllm.test_workers import BLOCK, ask, sections, text

TOKENS = 60

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(LIMIT_S)]


def write_tiny_gpt2(folder: Path) -> Path:
    """An architecture that our own engine has not, with random weights and the tiny model's tokenizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import GPT2Config, GPT2LMHeadModel

        write_tiny_model(folder)
        torch.manual_seed(0)
        shape: dict[str, Any] = {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 512}
        config = GPT2Config(vocab_size=VOCAB_SIZE, initializer_range=0.3, bos_token_id=1, eos_token_id=2, **shape)
        GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


async def test_a_model_that_our_engine_has_not_is_served_exactly(vllm_python: Path, tmp_path: Path) -> None:
    folder = write_tiny_gpt2(tmp_path / "tiny-gpt2")
    with pytest.raises(ModelError, match="GPT2LMHeadModel"):
        resolve_model(str(folder))
    oracle = Oracle(folder)
    settings = sections(vllm_python) | {"engine": {"block_size": BLOCK, "kv_memory": "64MiB"}}
    async with running_service(folder, 0, 1, **settings) as service:
        prompts = [random_prompt(length, seed=length) for length in (1, 31, 32, 33, 200)]
        answers = await asyncio.gather(*(ask(service, prompt, 16) for prompt in prompts))
        assert [answer.token_ids for answer in answers] == [oracle.greedy(prompt, 16) for prompt in prompts]
        again = await ask(service, [*prompts[-1], 5], 4)
        assert again.usage.cached_tokens == 192
        await until_idle(service, PATIENCE_S)
        await until_tree_is_right(service, PATIENCE_S)


async def test_our_engine_and_vllm_serve_one_model_together(vllm_python: Path) -> None:
    """An answer that began with vLLM and lost it goes on with ours, token for token."""
    oracle = Oracle(resolve_model("smollm2").folder)
    settings = sections(vllm_python)
    settings["workers"] |= {"engine": "baton", "decode": {"baton": 1, "vllm": 1}}
    async with running_service("smollm2", 0, **settings) as service:
        assert ["vLLM built" in service.log(name) for name in ("decode-1", "decode-2")] == [False, True]
        await a_killed_decode_worker_costs_no_token(service, oracle, lost="decode-2", left="decode-1")


async def a_killed_decode_worker_costs_no_token(service: Service, oracle: Oracle, lost: str, left: str) -> None:
    """The one worker is killed while it answers; the other one, which slept until then, ends all answers."""
    prompts = [text(300 + number, 40) for number in range(6)]
    requests = [greedy(prompt, TOKENS, ignore_eos=True) for prompt in prompts]
    _, answers = await killed_in_mid_stream(service, requests, {lost: lambda: service.kill(lost)}, later=[left])
    expected = [oracle.greedy(prompt, TOKENS, ignore_eos=True) for prompt in prompts]
    assert [answer.token_ids for answer in answers] == expected
    assert {answer.served_by[0].decode_worker for answer in answers} == {left}
    await until_gone(service, lost, PATIENCE_S)
