"""Two routers of one service on the same ports: one dies or leaves, the other answers, and both know the same."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import httpx
import pytest

from baton.service.launcher import Launcher
from baton.service.local.local_launcher import LocalLauncher
from baton_proto.generated import inference_pb2 as pb
from runtime.calls.router import Client
from runtime.config.serving import ServingConfig
from runtime.security.secret import Secret
from tests.baton.service.test_service_run import KEY, WAIT_S, Told, running
from tests.freezing import freeze
from tests.ray_cluster import ray_cluster
from tests.service import running_service

SERVICE = {"router": {"replicas": 2}, "workers": {"prefill": 0, "decode": 1}}
ROUTERS = ["router-1", "router-2"]
REQUEST = pb.GenerateRequest(
    tokens=pb.TokenIds(ids=[3 + i % 200 for i in range(100)]),
    sampling=pb.SamplingOptions(temperature=0.0, max_tokens=4, ignore_eos=True),
)
BODIES = {
    "completions": {"prompt": "hello", "max_tokens": 4},
    "responses": {"input": "hello", "max_output_tokens": 4},
}
AT_ONCE_S = 1.0
WINDOW_S = 1.5


@pytest.fixture(params=["here", pytest.param("on ray", marks=[pytest.mark.slow, pytest.mark.ray])])
def launcher(request: pytest.FixtureRequest) -> Iterator[Callable[[ServingConfig], Launcher]]:
    if request.param == "here":
        yield LocalLauncher
        return
    from baton.service.on_ray.cluster import connected

    with ray_cluster(head_cpus=4) as cluster, connected(cluster.address, "replicas"):
        from baton.service.on_ray.launcher import RayLauncher

        yield RayLauncher


async def test_while_a_router_that_was_killed_starts_again_the_other_answers_and_both_know_the_same(
    launcher: Callable[[ServingConfig], Launcher],
) -> None:
    async with running(launcher, **SERVICE) as (told, task):
        before, worker = dict(told.addresses), told.pids["decode-1"]
        assert before["router-1"] == before["router-2"]
        for router_id in ROUTERS:
            async with client_of(told, router_id) as client:
                await client.generate(REQUEST, timeout_s=WAIT_S)
        kept = [(await asked_over_http(told, "responses"))["id"] for _ in range(8)]  # by both
        async with client_of(told, "router-1") as of_the_dead:
            os.kill(told.pids["router-1"], signal.SIGKILL)
            await told.until({"event": "lost", "id": "router-1", "goes_on": True})
            back = asyncio.create_task(told.until({"event": "ready", "id": "router-1"}))
            lost_s, longest_s = time.monotonic(), 0.0
            while not back.done():
                began_s = time.monotonic()
                await asyncio.gather(asked_over_http(told), of_the_dead.generate(REQUEST, timeout_s=WAIT_S))
                longest_s = max(longest_s, time.monotonic() - began_s)
            away_s = time.monotonic() - lost_s
            assert longest_s < max(AT_ONCE_S, away_s / 2), "nobody waited until it was back"
        assert (told.addresses, told.pids["decode-1"]) == (before, worker)
        for response_id in kept:
            await asked_over_http(told, "responses", previous_response_id=response_id)
        for router_id in ROUTERS:
            async with client_of(told, router_id) as client:
                assert [worker.verdict for worker in await client.diff(pb.DiffRequest())] == [pb.DIFF_VERDICT_EQUAL]
        assert not task.done()


@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_router_that_hangs_is_replaced_and_whoever_asked_it_is_served(
    launcher: Callable[[ServingConfig], Launcher], replicas: int
) -> None:
    router = SERVICE["router"] | {"replicas": replicas}
    async with running(launcher, router=router, workers=SERVICE["workers"]) as (told, task):
        before = dict(told.addresses)
        freeze(told.pids["router-1"])
        waiting = [asyncio.create_task(asked_until_answered(told)) for _ in range(8)]  # some wait at the one that hangs
        await told.until({"event": "lost", "id": "router-1", "goes_on": True}, {"event": "ready", "id": "router-1"})
        await asyncio.gather(*waiting)
        assert told.addresses == before
        assert not task.done()


async def test_a_router_that_is_told_to_leave_hands_its_clients_over_and_no_request_fails() -> None:
    """Over gRPC each client calls again at once, so that calls are on their way at any moment."""
    ending = asyncio.Event()

    async def over_grpc(client: Client) -> None:
        while not ending.is_set():
            await client.models(timeout_s=WAIT_S)
            await client.generate(REQUEST, timeout_s=WAIT_S)

    async with (
        running(**SERVICE) as (told, task),
        httpx.AsyncClient(timeout=WAIT_S) as kept,
        contextlib.AsyncExitStack() as clients,
        asyncio.TaskGroup() as callers,
    ):
        for _ in range(8):
            callers.create_task(over_grpc(await clients.enter_async_context(client_of(told, "router-2"))))
        left = asyncio.create_task(
            told.until({"event": "lost", "id": "router-2"}, {"event": "ready", "id": "router-2"})
        )
        os.kill(told.pids["router-2"], signal.SIGTERM)
        while not left.done():
            await asyncio.gather(
                *(asked_over_http(told, client=kept) for _ in range(8)),
                asked_over_http(told),
            )
        ending.set()
        assert not task.done()


async def test_a_connection_whose_answer_outlasts_the_hand_over_is_answered_once_more() -> None:
    """The head of that answer came before: it could not say that it is the last one."""
    long = 600  # tokens, which take longer than idle connections are kept

    def ask_twice(address: str) -> list[int]:
        host, _, port = address.rpartition(":")
        codes = list[int]()
        with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=WAIT_S)) as connection:
            connection.connect()
            connection.auto_open = 0  # a connection that has been closed is an error
            for tokens in (long, 4):
                body = {"model": "mock", "prompt": "hello", "max_tokens": tokens, "ignore_eos": True, "stream": True}
                connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
                with connection.getresponse() as answer:
                    answer.read()
                codes.append(answer.status)
        return codes

    async with running(**SERVICE) as (told, _), client_of(told, "router-1") as client:
        asking = [
            asyncio.create_task(asyncio.to_thread(ask_twice, told.addresses["router-1"]["http"])) for _ in range(5)
        ]
        async with asyncio.timeout(WAIT_S):
            while (await client.status(WAIT_S)).queue.running < len(asking):
                await asyncio.sleep(0.02)
        os.kill(told.pids["router-2"], signal.SIGTERM)
        assert await asyncio.gather(*asking) == [[200, 200]] * len(asking)


async def test_of_routers_that_end_together_one_serves_the_drain_window() -> None:
    router = {"replicas": 2, "drain_window_s": WINDOW_S}
    async with running_service("mock", 0, 1, router=router) as service, asyncio.timeout(WAIT_S):
        end_s = time.monotonic() + WINDOW_S
        stopping = asyncio.create_task(service.supervisor.stop())
        codes = [200]
        while codes[-1]:
            assert codes[-1] == 200 or time.monotonic() >= end_s
            codes.append(await code_of_a_new_connection(f"{service.http_url}/v1/completions"))
        assert time.monotonic() >= end_s
        assert await stopping


async def asked_until_answered(told: Told) -> dict[str, Any]:
    """The answer to a client that asks again when its connection breaks."""
    while True:
        with contextlib.suppress(httpx.TransportError):
            return await asked_over_http(told)
        await asyncio.sleep(0.1)


async def code_of_a_new_connection(url: str) -> int:
    """0: there is none."""
    try:
        async with httpx.AsyncClient(timeout=WAIT_S) as http:
            return (await http.post(url, json={"model": "mock"} | BODIES["completions"])).status_code
    except httpx.TransportError:
        return 0


async def asked_over_http(
    told: Told, dialect: str = "completions", client: httpx.AsyncClient | None = None, **more: str
) -> dict[str, Any]:
    """The answer. Without a client: on a connection of its own."""
    body = {"model": "mock"} | BODIES[dialect] | more
    async with httpx.AsyncClient(timeout=WAIT_S) if client is None else nullcontext(client) as http:
        answer = await http.post(f"http://{told.addresses['router-1']['http']}/v1/{dialect}", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@asynccontextmanager
async def client_of(told: Told, router_id: str) -> AsyncIterator[Client]:
    """A client whose connection the system has given to this router."""
    while True:
        async with Client(told.addresses["router-1"]["grpc"], operator_key=Secret(KEY)) as client:
            if (await client.status(WAIT_S)).router_id == router_id:
                yield client
                return
