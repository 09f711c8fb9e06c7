"""What only a fleet with vLLM can do: serve a model that our own engine has not, and serve one together with it."""

import asyncio
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_proto.generated import inference_pb2 as pb
from runtime.calls.answer import Answer
from runtime.checkpoint.model_files import resolve_model
from runtime.errors import ModelError
from tests.service import Service, running_service
from tests.spine.oracle import Oracle
from tests.spine.prompts import ask, greedy, random_prompt
from tests.spine.worker_view import until_gone, until_idle, until_tree_is_right
from tests.tiny_model import VOCAB_SIZE, write_tiny_model
from tests.vllm.test_workers import BLOCK, sections, text

TOKENS = 40

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


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
        answers = await asyncio.gather(*(ask(service.client, prompt, 16) for prompt in prompts))
        assert [answer.token_ids for answer in answers] == [oracle.greedy(prompt, 16) for prompt in prompts]
        again = await ask(service.client, [*prompts[-1], 5], 4)
        assert again.usage.cached_tokens == 192
        await until_idle(service)
        await until_tree_is_right(service)


async def test_our_engine_and_vllm_serve_one_model_together(vllm_python: Path) -> None:
    """An answer that began with vLLM and lost it goes on with ours, token for token."""
    oracle = Oracle(resolve_model("smollm2").folder)
    settings = sections(vllm_python)
    settings["workers"] |= {"engine": "baton", "decode": {"baton": 1, "vllm": 1}}
    async with running_service("smollm2", 0, **settings) as service:
        assert ["vLLM built" in service.log(name) for name in ("decode-1", "decode-2")] == [False, True]
        await a_killed_decode_worker_costs_no_token(service, oracle, lost="decode-2", left="decode-1")


async def a_killed_decode_worker_costs_no_token(service: Service, oracle: Oracle, lost: str, left: str) -> None:
    """Kills the one worker as soon as every prompt has an answer that has begun; the other one ends them all."""
    prompts = [text(300 + number, 40) for number in range(6)]
    begun: set[int] = set()

    async def stream(number: int) -> Answer:
        def note(_: pb.Piece) -> None:
            begun.add(number)
            if len(begun) == len(prompts) and lost in service.workers("decode"):
                service.kill(lost)

        return await service.client.generate(greedy(prompts[number], TOKENS, ignore_eos=True), 120, note)

    answers = await asyncio.gather(*map(stream, range(len(prompts))))
    expected = [oracle.greedy(prompt, TOKENS, ignore_eos=True) for prompt in prompts]
    assert [answer.token_ids for answer in answers] == expected
    assert {answer.served_by[0].decode_worker for answer in answers} == {left}
    assert any(answer.served_by[0].attempts > 1 for answer in answers)
    await until_gone(service, lost)
