"""A shared prefix is found again: the request goes to the worker that holds it, and only the rest is computed."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

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
ALMOST_ALL = 8  # of 10: while a worker is slow, for the machine's sake, another one may be sooner without its prefix


async def ask_and_settle(service: Service, prompt: list[int], max_tokens: int = 4) -> Answer:
    answer = await ask(service.client, prompt, max_tokens)
    await until_idle(service)
    await until_tree_is_right(service)
    return answer


async def warm_up(service: Service) -> None:
    """All workers have served, so that none is expected to be slow for its very first prompt's sake."""
    await asyncio.gather(*(ask(service.client, random_prompt(100, seed), 8) for seed in range(1000, 1024)))
    await until_idle(service)


async def test_prefill_workers_are_chosen_by_the_prefix_that_they_hold(tiny_model: Path) -> None:
    """Decode workers hold what was shipped to them, so this one has a decode worker for each request."""
    async with running_service(tiny_model, 3, 1, SHIP_ALL) as service:
        await warm_up(service)
        shared = {seed: random_prompt(1600, seed) for seed in range(10)}
        first = {seed: await ask_and_settle(service, [*prompt, 5]) for seed, prompt in shared.items()}
        holders = {seed: answer.served_by[0].prefill_worker for seed, answer in first.items()}
        assert len(set(holders.values())) > 1, "new prompts are spread"
        kept = 0
        for seed, prompt in shared.items():
            answer = await ask_and_settle(service, prompt + random_prompt(40, seed + 50))
            if answer.served_by[0].prefill_worker == holders[seed]:
                kept += 1
                assert answer.usage.cached_tokens == 1600 // BLOCK_SIZE * BLOCK_SIZE
                assert answer.served_by[0].kv_blocks == -(-1640 // BLOCK_SIZE) - 1600 // BLOCK_SIZE, (
                    "only the rest is shipped"
                )
        assert kept >= ALMOST_ALL
        assert {answer.usage.cached_tokens for answer in first.values()} == {0}


async def test_decode_workers_that_run_prompts_are_chosen_by_the_prefix_that_they_hold(tiny_model: Path) -> None:
    async with running_service(tiny_model, 0, 3) as service:
        await warm_up(service)
        shared = {seed: random_prompt(1500, seed) for seed in range(10)}
        holders = {
            seed: (await ask_and_settle(service, prompt)).served_by[0].decode_worker for seed, prompt in shared.items()
        }
        assert len(set(holders.values())) > 1, "new prompts are spread"
        kept = 0
        for seed, prompt in shared.items():
            answer = await ask_and_settle(service, [*prompt, 9, 9, 9])
            if answer.served_by[0].decode_worker == holders[seed]:
                kept += 1
                assert answer.usage.cached_tokens == 1500 // BLOCK_SIZE * BLOCK_SIZE
        assert kept >= ALMOST_ALL


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
