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
from tests.spine.worker_view import POLL_S, inspect, until_idle, until_running, worker_client

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
async def ended_early(service: Service, worker_id: str, whole_steps: float) -> AsyncIterator[None]:
    """The worker, once it runs the request, stands still while the client leaves, so that a slow client costs no steps.
    Then it becomes idle after fewer than half of the steps that the request takes when nobody leaves."""
    async with worker_client(service, worker_id) as worker:
        await worker.inspect()  # connects
        await until_running(service, worker_id)
        service.kill(worker_id, signal.SIGSTOP)
        asked = asyncio.create_task(worker.inspect())  # which it answers when it goes on
        try:
            yield
            async with asyncio.timeout(45):
                while (await service.client.status(60)).queue.running:
                    await asyncio.sleep(POLL_S)
        finally:
            service.kill(worker_id, signal.SIGCONT)
        left_at = (await asked).load.steps
        await until_idle(service)
        assert (await worker.inspect()).load.steps - left_at < whole_steps / 2


async def leaving_grpc_in_mid_stream(service: Service) -> None:
    stream = service.client.stream(greedy(random_prompt(200, seed=1), 3000, ignore_eos=True), 60)
    async for response in stream:
        if response.WhichOneof("event") == "piece":
            break
    async with ended_early(service, "decode-1", ANSWER_STEPS):
        await stream.aclose()  # type: ignore[attr-defined]


async def leaving_grpc_in_mid_prompt(service: Service) -> None:
    request = asyncio.create_task(service.client.generate(greedy(random_prompt(3000, seed=2), 10), 60))
    async with ended_early(service, "prefill-1", PROMPT_STEPS):
        assert (await inspect(service, "decode-1")).load.leases == 1
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request


async def leaving_http(service: Service, stream: bool) -> None:
    body = {
        "model": "tiny-llama",
        "prompt": random_prompt(200, seed=3),
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": stream,
    }
    async with httpx.AsyncClient(base_url=service.http_url, timeout=60) as client:
        request = asyncio.create_task(client.post("/v1/completions", json=body))
        async with ended_early(service, "decode-1", ANSWER_STEPS):
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request


async def the_deadline_passes(service: Service) -> None:
    request = asyncio.create_task(
        service.client.generate(greedy(random_prompt(200, seed=4), 3000, ignore_eos=True), 3.0)
    )
    async with ended_early(service, "decode-1", ANSWER_STEPS):
        with pytest.raises(Exception, match=r"(?i)deadline"):
            await request
