import asyncio
import contextlib
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest

from baton_proto.generated import inference_pb2 as pb, inference_pb2_grpc as pb_grpc
from router.api.grpc import receiving
from router.api.grpc.receiving import Receiving
from router.api.serving.grpc_api import GrpcApi
from router.requests.body_budget import BodyBudget
from runtime.config.serving import RouterConfig
from runtime.errors import OverloadedError
from runtime.security.grpc_bearer import LOOKAHEAD_BYTES
from tests.no_collector import no_collector
from tests.router.api.conversations import grpc_serving
from tests.router.api.grpc.unfinished_messages import Unfinished
from tests.router.scripted_generator import ScriptedGenerator, make_frontend, tiny_tokenizer

GENERATE = "/baton.v1.Inference/Generate"
MESSAGE_BYTES = 1 << 20
PLACES = 4
CONNECTIONS, CALLS = 8, 60  # half a gigabyte is announced
LIMIT_BYTES = 2 * PLACES * MESSAGE_BYTES + CONNECTIONS * CALLS * LOOKAHEAD_BYTES  # twice: who left is told later
MORE_BYTES = 100 << 20  # of memory, for connections and whatever else


@pytest.fixture
async def api(tiny_model: Path) -> AsyncIterator[GrpcApi]:
    frontend = make_frontend(ScriptedGenerator(tiny_tokenizer(tiny_model)))
    frontend = replace(
        frontend, config=RouterConfig(max_body_bytes=MESSAGE_BYTES), bodies=BodyBudget(PLACES * MESSAGE_BYTES)
    )
    async with grpc_serving(frontend) as api:
        yield api


async def ask(stub: pb_grpc.InferenceStub) -> None:
    responses = [response async for response in stub.Generate(pb.GenerateRequest(text="Hi"), timeout=60)]
    assert responses[-1].WhichOneof("event") == "finished"


@pytest.mark.parametrize("path", [GENERATE, "/grpc.health.v1.Health/Check"])
async def test_messages_that_nobody_ends_have_a_common_budget_and_others_are_served(api: GrpcApi, path: str) -> None:
    strangers = [Unfinished(path, CALLS, MESSAGE_BYTES) for _ in range(CONNECTIONS)]
    process = psutil.Process()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{api.port}") as channel:
        stub = pb_grpc.InferenceStub(channel)
        await ask(stub)
        before = process.memory_info().rss
        running = [asyncio.create_task(stranger.run(api.port)) for stranger in strangers]
        async with asyncio.timeout(60):
            while not all(stranger.ended for stranger in strangers):  # each had its turn
                await asyncio.wait(running, timeout=0.01)
                assert sum(stranger.held_bytes for stranger in strangers) <= LIMIT_BYTES
                assert process.memory_info().rss < before + LIMIT_BYTES + MORE_BYTES
        await ask(stub)
        assert not any(task.done() for task in running)
        for task in running:
            task.cancel()


async def test_a_message_that_is_refused_needs_no_collector(api: GrpcApi) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{api.port}") as channel:
        call: Any = channel.unary_stream(GENERATE)  # takes and gives bytes
        message = b"\xff" * (MESSAGE_BYTES - 100)

        async def ask() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call(message, timeout=60).read()
                raise AssertionError("it is answered")

        await ask()
        with no_collector():
            for _ in range(5):
                await ask()
            kept, _ = tracemalloc.get_traced_memory()
        assert kept < 2 * MESSAGE_BYTES, "of five; one may not be gone yet"


class Call:
    """The context of a call that says one thing when it is told to."""

    def __init__(self, connection: str) -> None:
        self.said: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._connection = connection

    def peer(self) -> str:
        return self._connection

    async def read(self) -> bytes:
        return await self.said


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_connections_take_turns() -> None:
    places, order = Receiving(1, 1), []
    calls = [Call(name) for name in ("a", "a", "a", "b", "c")]

    async def receive(number: int) -> None:
        async with places.message(calls[number]):
            order.append(number)

    tasks = [asyncio.create_task(receive(number)) for number in range(len(calls))]
    await turn()
    tasks[2].cancel()  # who leaves costs no place
    for call in calls:
        call.said.set_result(b"x")
    await asyncio.wait(tasks, timeout=60)
    assert order == [0, 1, 3, 4]
    last = Call("d")
    last.said.set_result(b"y")
    async with asyncio.timeout(60), places.message(last) as data:
        assert data == b"y"


async def test_the_queue_for_places_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "MAX_WAITING", 1)
    places, calls = Receiving(1, 1), [Call("a"), Call("a")]

    async def receive(call: Call) -> None:
        async with places.message(call):
            pass

    tasks = [asyncio.create_task(receive(call)) for call in calls]
    await turn()
    with pytest.raises(OverloadedError, match="queue of unread messages holds its limit of 1"):
        await receive(Call("b"))
    for call in calls:
        call.said.set_result(b"x")
    await asyncio.gather(*tasks)
