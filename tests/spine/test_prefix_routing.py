"""A shared prefix is found again: the request goes to the worker that holds it, and only the rest is computed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from runtime.calls.answer import Answer
from tests.service import Service, SharedService, running_service
from tests.spine.prompts import ask, random_prompt
from tests.spine.worker_view import until_idle, until_tree_is_right

SHIP_ALL = {"router": {"placement": {"local_prefill_tokens": 0}}}
BLOCK_SIZE = 16
PREFIX_TOKENS = 1600


async def ask_and_settle(service: Service, prompt: list[int], max_tokens: int = 4) -> Answer:
    answer = await ask(service.client, prompt, max_tokens)
    await until_idle(service)
    await until_tree_is_right(service)
    return answer


async def warm_up(service: Service) -> None:
    """All workers have served, so that none is expected to be slow for its very first prompt's sake."""
    await asyncio.gather(*(ask(service.client, random_prompt(100, seed), 8) for seed in range(1000, 1024)))
    await until_idle(service)


def slow_prompts(tokenizer: Path, *arguments: Any) -> AbstractAsyncContextManager[Service]:
    """A prefix is worth 160 ms: more than what a busy machine adds to the decode steps of one worker."""
    return running_service(
        "mock",
        *arguments,
        workers={"per_process": 1},
        mock={"tokenizer": str(tokenizer)},
        step_times={"prefill_token_ms": 0.1, "prefill_pair_ms": 0.0},
    )


async def test_prefill_workers_are_chosen_by_the_prefix_that_they_hold(tiny_model: Path) -> None:
    """Decode workers hold what was shipped to them, so there is only one."""
    async with slow_prompts(tiny_model, 3, 1, SHIP_ALL) as service:
        await warm_up(service)
        shared = [random_prompt(PREFIX_TOKENS, seed) for seed in range(10)]
        first = [await ask_and_settle(service, [*prompt, 5]) for prompt in shared]
        again = [await ask_and_settle(service, [*prompt, *random_prompt(40, 50)]) for prompt in shared]
    holders = [answer.served_by[0].prefill_worker for answer in first]
    assert len(set(holders)) > 1, "new prompts are spread"
    assert [answer.served_by[0].prefill_worker for answer in again] == holders
    assert {answer.usage.cached_tokens for answer in first} == {0}
    assert {answer.usage.cached_tokens for answer in again} == {PREFIX_TOKENS}
    assert {answer.served_by[0].kv_blocks for answer in again} == {-(-40 // BLOCK_SIZE)}, "only the rest is shipped"


async def test_decode_workers_that_run_prompts_are_chosen_by_the_prefix_that_they_hold(tiny_model: Path) -> None:
    async with slow_prompts(tiny_model, 0, 3) as service:
        await warm_up(service)
        shared = [random_prompt(PREFIX_TOKENS, seed) for seed in range(10)]
        first = [await ask_and_settle(service, prompt) for prompt in shared]
        again = [await ask_and_settle(service, [*prompt, 9, 9, 9]) for prompt in shared]
    holders = [answer.served_by[0].decode_worker for answer in first]
    assert len(set(holders)) > 1, "new prompts are spread"
    assert [answer.served_by[0].decode_worker for answer in again] == holders
    assert {answer.usage.cached_tokens for answer in again} == {PREFIX_TOKENS}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def salted(tiny_model: Path) -> AsyncIterator[SharedService]:
    """With one worker of each role, so that no request misses a prefix because it is elsewhere."""
    async with SharedService(tiny_model, 1, 1, SHIP_ALL, engine={"cache_salt": "this service's own"}) as shared:
        yield shared


@pytest.mark.asyncio(loop_scope="module")
async def test_usage_reports_cached_tokens_as_openai_does(salted: SharedService) -> None:
    async with salted.using() as service:
        prompt = random_prompt(100, seed=3)
        async with openai.AsyncOpenAI(base_url=f"{service.http_url}/v1", api_key="none") as client:
            cached = []
            for _ in range(2):
                answer = await client.completions.create(model="tiny-llama", prompt=prompt, max_tokens=3, temperature=0)
                assert answer.usage is not None
                assert answer.usage.prompt_tokens_details is not None
                assert answer.usage.prompt_tokens == 100
                cached.append(answer.usage.prompt_tokens_details.cached_tokens)
                await until_idle(service)
                await until_tree_is_right(service)
        assert cached == [0, 96]


@pytest.mark.asyncio(loop_scope="module")
async def test_only_requests_with_the_same_cache_salt_share_prefixes(salted: SharedService) -> None:
    async with salted.using() as service:
        body = {"model": "tiny-llama", "prompt": random_prompt(100, seed=4), "max_tokens": 3, "temperature": 0}
        async with httpx.AsyncClient(base_url=f"{service.http_url}/v1", timeout=60) as client:
            cached, texts = [], set()
            for salt in ({}, {}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}):
                answer = (await client.post("/completions", json=body | salt)).json()
                cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
                texts.add(answer["choices"][0]["text"])
                await until_idle(service)
                await until_tree_is_right(service)
        assert cached == [0, 96, 0, 96, 0]
        assert len(texts) == 1
