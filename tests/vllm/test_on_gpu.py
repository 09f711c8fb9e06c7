"""vLLM's workers on one GPU: prompts on some, answers on others, KV through GPU memory that worker processes map."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.checkpoint.model_files import resolve_model
from tests.service import Service, running_service
from tests.spine import worker_view
from tests.spine.oracle import Oracle
from tests.spine.prompts import ask
from tests.vllm.test_workers import text

BLOCK = 64
PATIENCE_S = 120.0
CLOSE = 0.5  # of a logit: how far bfloat16 may be from the oracle's float32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(500),
]


def sections(python: Path, transport: str) -> dict[str, Any]:
    return {
        "workers": {"engine": "vllm", "python": str(python), "ready_timeout_s": 300.0},
        "engine": {"block_size": BLOCK, "kv_memory": "1GiB", "max_model_len": 2048, "max_batch_tokens": 512},
        "router": {"placement": {"local_prefill_tokens": 0}},
        "transfer": {"transport": transport},
    }


def is_greedy(oracle: Oracle, prompt: list[int], answer: list[int]) -> bool:
    """Whether each token is, but for rounding, the likeliest one after those before it. Wrong KV tells other ones."""
    logits = oracle.logits([*prompt, *answer])[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return bool((logits.max(1).values - chosen <= CLOSE).all())


@pytest.mark.parametrize("transport", ["cuda_ipc", "tcp"])
async def test_prompts_and_answers_on_different_vllm_workers_of_a_gpu(vllm_python: Path, transport: str) -> None:
    oracle = Oracle(resolve_model("smollm2").folder)
    async with running_service("smollm2", 1, 2, **sections(vllm_python, transport)) as service:
        await every_prompt_is_shipped(service, oracle, transport)
        await a_second_question_fetches_only_what_its_worker_has_not(service, oracle)
        await a_killed_decode_worker_costs_no_token(service, oracle)
        await worker_view.until_idle(service, PATIENCE_S)
        await worker_view.until_tree_is_right(service, PATIENCE_S)


async def every_prompt_is_shipped(service: Service, oracle: Oracle, transport: str) -> None:
    prompts = [text(number, length) for number, length in enumerate((1, 2, 63, 64, 65, 127, 129, 300, 1100))]
    answers = await asyncio.gather(*(ask(service.client, prompt, 12, PATIENCE_S) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert is_greedy(oracle, prompt, answer.token_ids), (len(prompt), answer.token_ids)
    shipped = [answer.served_by[0] for answer in answers]
    assert {(one.attempts, one.transport) for one in shipped} == {(1, transport)}
    assert [one.kv_blocks for one in shipped] == [-(-len(prompt) // BLOCK) for prompt in prompts]


async def a_second_question_fetches_only_what_its_worker_has_not(service: Service, oracle: Oracle) -> None:
    chat = text(100, 5 * BLOCK)
    first = await ask(service.client, chat, 2 * BLOCK, PATIENCE_S, ignore_eos=True)
    await worker_view.until_idle(service, PATIENCE_S)
    await worker_view.until_tree_is_right(service, PATIENCE_S)
    longer = [*chat, *first.token_ids, 504, 3575]
    second = await ask(service.client, longer, 6, PATIENCE_S)
    assert second.usage.cached_tokens >= 6 * BLOCK
    assert second.served_by[0].kv_blocks <= 2
    assert is_greedy(oracle, longer, second.token_ids)


async def a_killed_decode_worker_costs_no_token(service: Service, oracle: Oracle) -> None:
    prompts = [text(300 + number, 200) for number in range(8)]
    asked = [asyncio.create_task(ask(service.client, prompt, 400, PATIENCE_S, ignore_eos=True)) for prompt in prompts]
    victim = await worker_view.first_running(service, service.workers("decode"), PATIENCE_S)
    service.kill(victim, signal.SIGKILL)
    answers = await asyncio.gather(*asked)
    assert any(answer.served_by[0].attempts > 1 for answer in answers), "nobody was on the killed worker"
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == 400
        assert is_greedy(oracle, prompt, answer.token_ids)
