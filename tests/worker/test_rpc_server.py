"""Each question to a worker has a row of the server and a method of the client, under one name."""

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from baton_proto.worker import QUESTIONS, Question
from runtime.calls.worker import WorkerClient
from runtime.security.grpc_bearer import LOOKAHEAD_BYTES
from runtime.security.keys import NO_KEYS
from worker.changes.sleep import Sleeper
from worker.rpc_server import WorkerService
from worker.runtime import WorkerRuntime


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.name)
def test_the_client_has_a_method_for_each_question(question: Question[Any]) -> None:
    method = getattr(WorkerClient, question.name.lower())
    assert inspect.isasyncgenfunction(method) if question.streamed else inspect.iscoroutinefunction(method)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.name)
async def test_the_server_knows_each_question_and_refuses_what_it_cannot_decode(question: Question[Any]) -> None:
    service = WorkerService(cast(WorkerRuntime, SimpleNamespace(keys=NO_KEYS)))
    address = await service.start("127.0.0.1")
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.unary_stream(question.method) if question.streamed else channel.unary_unary(question.method)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [answer async for answer in call(b"\xc1")] if question.streamed else await call(b"\xc1")
    assert caught.value.code() is not grpc.StatusCode.UNIMPLEMENTED
    await service.stop(0)


async def test_a_worker_falls_asleep_though_its_caller_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on, asleep = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def sleep(sleeper: Sleeper, level: int, timeout_s: float) -> None:
        began.set()
        await go_on.wait()
        asleep.set()

    monkeypatch.setattr(Sleeper, "sleep", sleep)
    service = WorkerService(cast(WorkerRuntime, SimpleNamespace(keys=NO_KEYS)))
    client = WorkerClient("w", await service.start("127.0.0.1"))
    caller = asyncio.create_task(client.sleep(1, 60.0))
    await asyncio.wait_for(began.wait(), 60)
    caller.cancel()
    await client.close()
    await service.stop(0)
    go_on.set()
    await asyncio.wait_for(asleep.wait(), 60)


async def test_a_question_is_no_longer_than_what_is_taken_of_it_unread() -> None:
    service = WorkerService(cast(WorkerRuntime, SimpleNamespace(keys=NO_KEYS)))
    address = await service.start("127.0.0.1")
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(QUESTIONS[-1].method)(bytes(LOOKAHEAD_BYTES + 1))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await service.stop(0)
