"""More than fits: the router refuses and says when to come back, and what it has taken it finishes, exactly, however
small the KV pool."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import openai
import pytest

from tests.service import Service, running_service
from tests.spine.oracle import Oracle
from tests.spine.prompts import ask, greedy, random_prompt
from tests.spine.worker_view import until_idle

QUEUE_LIMIT = 12
POOL_TOKENS = 1024
SHIP_SOME = {"router": {"placement": {"local_prefill_tokens": 50}, "queue_limit": QUEUE_LIMIT}}
SMALL_POOL = {"kv_memory": "1MiB", "max_running": 16}


@pytest.fixture
async def service(tiny_model: Path) -> AsyncIterator[Service]:
    async with running_service(tiny_model, 1, 1, SHIP_SOME, engine=SMALL_POOL) as service:
        yield service


async def test_overload(service: Service, tiny_model: Path) -> None:
    """One service for all of it."""
    await more_requests_than_the_pool_holds_are_exact(service, Oracle(tiny_model))
    await the_pool_is_a_limit_of_one_request(service)
    await a_full_queue_refuses_and_says_when_to_come_back(service)


async def more_requests_than_the_pool_holds_are_exact(service: Service, oracle: Oracle) -> None:
    """Each may grow to a quarter of the pool: they wait for blocks, and are preempted."""
    prompts = [random_prompt(20 + 7 * i, seed=i) for i in range(12)]
    answers = await asyncio.gather(*(ask(service.client, prompt, 130, ignore_eos=True) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == oracle.greedy(prompt, 130, ignore_eos=True, guess=answer.token_ids)
    assert {answer.served_by[0].prefill_worker for answer in answers} == {"", "prefill-1"}
    await until_idle(service)


async def the_pool_is_a_limit_of_one_request(service: Service) -> None:
    exact = await ask(service.client, random_prompt(POOL_TOKENS - 24, seed=1), 24, ignore_eos=True)
    assert len(exact.token_ids) == 24
    default = await service.client.generate(greedy(random_prompt(POOL_TOKENS - 5, seed=2), 5, ignore_eos=True), 30)
    assert len(default.token_ids) == 5
    for length, max_tokens, field in ((POOL_TOKENS - 24, 25, "max_tokens"), (POOL_TOKENS, 1, "tokens.ids")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(service.client, random_prompt(length, seed=3), max_tokens)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith(f"{field}: ")
        assert f"the largest worker takes {POOL_TOKENS}" in (caught.value.details() or "")
    await until_idle(service)


async def a_full_queue_refuses_and_says_when_to_come_back(service: Service) -> None:
    service.kill("decode-1", signal.SIGSTOP)  # so that none ends while others are refused
    running = [asyncio.create_task(ask(service.client, [5 + i], 400, ignore_eos=True)) for i in range(QUEUE_LIMIT)]
    await until_admitted(service, QUEUE_LIMIT)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(service.client, [5], 3)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"holds its limit of {QUEUE_LIMIT} requests; try again in" in (caught.value.details() or "")
    assert int(dict(caught.value.trailing_metadata() or ())["retry-after-ms"]) >= 1000
    async with httpx.AsyncClient(base_url=service.http_url, timeout=30) as http:
        for stream in (False, True):
            refused = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "stream": stream})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
        assert (await http.get("/ready")).status_code == 200
    service.kill("decode-1", signal.SIGCONT)
    async with openai.AsyncOpenAI(base_url=f"{service.http_url}/v1", api_key="none", max_retries=20) as client:
        patient = await client.completions.create(model="tiny-llama", prompt="x", max_tokens=3)
    assert patient.choices[0].finish_reason
    assert [len(answer.token_ids) for answer in await asyncio.gather(*running)] == [400] * QUEUE_LIMIT
    await until_idle(service)


async def until_admitted(service: Service, count: int, timeout_s: float = 45) -> None:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        queue = (await service.client.status(60)).queue
        if queue.waiting + queue.running == count:
            return
    raise AssertionError(f"{queue} is not {count} requests")
