"""A client that leaves frees its blocks on both workers at once, whatever its request was doing."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.service import Service, running_service
from tests.spine.prompts import greedy, random_prompt
from tests.spine.worker_view import POLL_S, inspect, inspect_all, until_idle, until_running, worker_client

SHIP_ALL = {"router": {"placement": {"local_prefill_tokens": 0}}}
PROMPT_STEPS = 3000 / 2  # of the long prompt, were it run to its end
ANSWER_STEPS = 3000


@pytest.fixture
async def service(tiny_model: Path) -> AsyncIterator[Service]:
    """Prompts of 3,000 tokens take more than a thousand steps here."""
    async with running_service(tiny_model, 1, 1, SHIP_ALL, engine={"max_batch_tokens": 2}) as service:
        yield service


async def test_leaving_frees_everything(service: Service) -> None:
    """One service for all ways of leaving."""
    await leaving_grpc_in_mid_stream(service)
    await leaving_grpc_in_mid_prompt(service)
    await leaving_http(service, stream=True)
    await leaving_http(service, stream=False)
    await the_deadline_passes(service)


@asynccontextmanager
async def ended_early(service: Service, whole_steps: float) -> AsyncIterator[None]:
    """The workers become idle after fewer than half of the steps that the request takes when nobody leaves."""

    async def steps() -> int:
        return sum(report.load.steps for report in await inspect_all(service))

    before = await steps()
    yield
    await until_idle(service)
    assert await steps() - before < whole_steps / 2


async def leaving_grpc_in_mid_stream(service: Service) -> None:
    async with ended_early(service, ANSWER_STEPS):
        stream = service.client.stream(greedy(random_prompt(200, seed=1), 3000, ignore_eos=True), 60)
        async for response in stream:
            if response.WhichOneof("event") == "piece":
                break
        assert (await inspect(service, "decode-1")).load.blocks_used > 0
        await stream.aclose()  # type: ignore[attr-defined]


async def leaving_grpc_in_mid_prompt(service: Service) -> None:
    """The prefill worker stands still while the client leaves: a slow client costs no steps that way. The worker's
    answer to what it was asked meanwhile says how many it had taken."""
    async with worker_client(service, "prefill-1") as prefill:
        before = (await prefill.inspect()).load.steps
        request = asyncio.create_task(service.client.generate(greedy(random_prompt(3000, seed=2), 10), 60))
        await until_running(service, "prefill-1")
        service.kill("prefill-1", signal.SIGSTOP)
        try:
            assert (await inspect(service, "decode-1")).load.leases == 1
            asked = asyncio.create_task(prefill.inspect())
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            async with asyncio.timeout(45):
                while (await service.client.status(60)).queue.running:
                    await asyncio.sleep(POLL_S)
        finally:
            service.kill("prefill-1", signal.SIGCONT)
        left_at = (await asked).load.steps
        await until_idle(service)
        left_over = before + PROMPT_STEPS - left_at
        assert (await prefill.inspect()).load.steps - left_at < left_over / 2


async def leaving_http(service: Service, stream: bool) -> None:
    body = {
        "model": "tiny-llama",
        "prompt": random_prompt(200, seed=3),
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": stream,
    }
    async with ended_early(service, ANSWER_STEPS), httpx.AsyncClient(base_url=service.http_url, timeout=60) as client:
        request = asyncio.create_task(client.post("/v1/completions", json=body))
        await until_running(service, "decode-1")
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request


async def the_deadline_passes(service: Service) -> None:
    async with ended_early(service, ANSWER_STEPS):
        with pytest.raises(Exception, match=r"(?i)deadline"):
            await service.client.generate(greedy(random_prompt(200, seed=4), 3000, ignore_eos=True), 0.5)
