"""A service that is told to stop: what is in flight ends, what is new is refused clearly, and all processes end with 0.
A single worker that is told to stop does so without a request noticing."""

import asyncio
import time
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runtime.calls.answer import Answer
from runtime.calls.router import Client
from tests.service import Service, running_service
from tests.spine.oracle import Oracle
from tests.spine.prompts import ask, greedy, random_prompt
from tests.spine.worker_view import first_running, until_idle, until_tree_is_right

SHIP_ALL = {
    "router": {"placement": {"local_prefill_tokens": 0}},
    "workers": {"drain_timeout_s": 60.0},  # nothing is cut off on a busy machine either: that is a warning
}
REFUSAL = "the router is draining and takes no new requests"
LENGTH = 2000  # so that it runs while new requests are refused
LONG = 800  # so that the first still runs when the last has begun


async def test_draining(tiny_model: Path) -> None:
    """First one worker of each role, then the whole service."""
    async with running_service(tiny_model, 2, 2, SHIP_ALL) as service:
        oracle = Oracle(tiny_model)
        prompts = [random_prompt(60 + i, seed=i) for i in range(4)]
        requests = await all_running(service, prompts)
        busy = await first_running(service, ["decode-1", "decode-2"])
        assert await asyncio.gather(service.stop_worker(busy), service.stop_worker("prefill-1")) == [True, True]
        answers = await asyncio.gather(*requests)
        assert busy in {answer.served_by[0].decode_worker for answer in answers}
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == oracle.greedy(prompt, LONG, ignore_eos=True, guess=answer.token_ids)
            assert answer.served_by[0].attempts == 1, "it was told to end it, not to drop it"
        later = await ask(service.client, prompts[0], 5)
        (left,) = {"decode-1", "decode-2"} - {busy}
        assert (later.served_by[0].prefill_worker, later.served_by[0].decode_worker) == ("prefill-2", left)
        await until_idle(service)
        await until_tree_is_right(service)
        await the_service_drains(service)


async def test_a_router_that_leaves_serves_on_while_it_sends_callers_elsewhere() -> None:
    """In the drain window all is served, and all that load balancers look at says that the router leaves; after it new
    requests are refused, and those in flight end."""
    window = {"drain_window_s": 4.0}
    completion = {"model": "mock", "prompt": "Who is there?", "max_tokens": 4}
    async with (
        running_service("mock", 0, 1, router=window, workers={"per_process": 1, "drain_timeout_s": 60.0}) as service,
        httpx.AsyncClient(base_url=service.http_url, timeout=60) as http,
        grpc.aio.insecure_channel(service.grpc_address) as channel,
    ):
        over_grpc = asyncio.create_task(ask(service.client, [5] * 50, LENGTH, ignore_eos=True))
        await until_answering(service, 1)
        kept = await http.post("/v1/completions", json=completion)
        assert (kept.status_code, kept.headers.get("connection")) == (200, None)
        began_s = time.monotonic()
        stopping = asyncio.create_task(service.supervisor.stop())
        await until_not_ready(http)
        health = health_pb2_grpc.HealthStub(channel)
        while (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING:
            await asyncio.sleep(0.01)
        served = 0
        while (answer := await http.post("/v1/completions", json=completion)).status_code == 200:
            assert answer.headers["connection"] == "close"
            served += 1
            await asyncio.sleep(0.1)
        assert served
        assert time.monotonic() - began_s >= window["drain_window_s"]
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, REFUSAL)
        assert (answer.headers["connection"], answer.headers["retry-after"]) == ("close", "1")
        assert not over_grpc.done()
        assert len((await over_grpc).token_ids) == LENGTH
        assert await stopping


async def test_a_deadline_is_told_on_a_connection_that_has_its_age() -> None:
    """The connection is to end with its last call, which the client's own deadline would cut off."""
    workers = {"per_process": 1, "drain_timeout_s": 3.0}  # connections have their age after 1 s
    async with running_service("mock", 0, 1, workers=workers) as service, asyncio.TaskGroup() as group:

        async def asked() -> grpc.StatusCode:
            async with Client(service.grpc_address) as client:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await client.generate(greedy([5] * 50, 100 * LENGTH, ignore_eos=True), 5)
            return caught.value.code()

        calls = [group.create_task(asked()) for _ in range(16)]
    assert {call.result() for call in calls} == {grpc.StatusCode.DEADLINE_EXCEEDED}


async def all_running(service: Service, prompts: list[list[int]]) -> list[asyncio.Task[Answer]]:
    """Requests that have their first token, and so run on decode workers: one that is still on its way to a worker when
    that is told to stop goes elsewhere."""
    begun = [asyncio.Event() for _ in prompts]

    async def run(prompt: list[int], first: asyncio.Event) -> Answer:
        return await service.client.generate(greedy(prompt, LONG, ignore_eos=True), 60, lambda piece: first.set())

    requests = [asyncio.create_task(run(prompt, first)) for prompt, first in zip(prompts, begun, strict=True)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(first.wait() for first in begun))
    return requests


async def the_service_drains(service: Service) -> None:
    body = {"prompt": random_prompt(50, seed=50), "max_tokens": LENGTH, "ignore_eos": True}
    async with (
        httpx.AsyncClient(base_url=service.http_url, timeout=60) as http,
        openai.AsyncOpenAI(base_url=f"{service.http_url}/v1", api_key="none", max_retries=0) as client,
    ):
        over_grpc = asyncio.create_task(ask(service.client, random_prompt(50, seed=51), LENGTH, ignore_eos=True))
        streamed = asyncio.create_task(stream(client, random_prompt(50, seed=52)))
        whole = asyncio.create_task(http.post("/v1/completions", json=body))
        await until_answering(service, 3)
        stopping = asyncio.create_task(service.supervisor.stop())
        await until_not_ready(http)
        await refused_over_grpc(service.client)
        async with Client(service.grpc_address) as newcomer:
            await refused_over_grpc(newcomer)
        refused = await http.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, REFUSAL)
        assert (await http.get("/health")).status_code == 200
        assert not any(request.done() for request in (over_grpc, streamed, whole)), "all was refused while they ran"

        assert len((await over_grpc).token_ids) == LENGTH
        assert await streamed == "length"
        assert (await whole).json()["usage"]["completion_tokens"] == LENGTH
    assert await stopping
    exit_codes = {name: (await child.wait()).returncode for name, child in service.supervisor.children.items()}
    assert set(exit_codes.values()) == {0}, exit_codes
    for name in service.supervisor.children:
        assert "Traceback" not in service.log(name)
        assert "warning" not in service.log(name), service.log(name)


async def stream(client: openai.AsyncOpenAI, prompt: list[int]) -> str | None:
    """The finish reason."""
    events = await client.completions.create(
        model="tiny-llama", prompt=prompt, max_tokens=LENGTH, stream=True, extra_body={"ignore_eos": True}
    )
    return [chunk.choices[0].finish_reason async for chunk in events][-1]


async def refused_over_grpc(client: Client) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(client, [5, 6], 3)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, REFUSAL)


async def until_answering(service: Service, count: int) -> None:
    async with asyncio.timeout(60):
        while (await service.client.status(60)).queue.running < count:
            await asyncio.sleep(0.01)


async def until_not_ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while (answer := await http.get("/ready")).status_code == 200:
            await asyncio.sleep(0.01)
    assert (answer.status_code, answer.json()) == (503, {"status": "the router is draining"})
    assert answer.headers["retry-after"] == "1"
    assert (await http.get("/ready")).headers["connection"] == "close"  # the first one may have come before the signal
