"""The Steps stream over a real gRPC server, with a handler that only remembers."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import pytest_asyncio

from baton.worker.step_stream import RouterStream, StepStreams
from baton_proto.discovery import WorkerLoad
from baton_proto.sampling import SamplingParams, TokenLogprobs
from baton_proto.worker import (
    MAJOR,
    SERVICE,
    STEPS,
    Cancel,
    Delta,
    Failure,
    Handoff,
    Hello,
    StepMessage,
    Submit,
    WorkerCommand,
    WorkerReport,
    decoder,
    encode,
)

# One event loop for all: gRPC's poller stumbles over loops that were closed.
pytestmark = pytest.mark.asyncio(loop_scope="session")

GATHER_S = 0.005
OURS = Hello(MAJOR, "decode-0", incarnation=42)
SUBMIT = Submit("r1", b"", 0, SamplingParams(max_tokens=1), timeout_s=1.0)


@dataclass
class Memory:
    commands: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    gone: asyncio.Queue[RouterStream] = field(default_factory=asyncio.Queue)

    def submit(self, router: RouterStream, request: Submit) -> None:
        self.commands.put_nowait((router, request))

    def cancel(self, router: RouterStream, request_id: str) -> None:
        self.commands.put_nowait((router, request_id))

    def router_gone(self, router: RouterStream) -> None:
        self.gone.put_nowait(router)


@dataclass
class Fixture:
    streams: StepStreams
    memory: Memory
    channel: grpc.aio.Channel

    async def open(self, hello: Any = None, raw: bytes | None = None) -> Any:
        call = self.channel.stream_stream(
            STEPS,
            request_serializer=lambda m: m if isinstance(m, bytes) else encode(m),
            response_deserializer=decoder(WorkerReport),
        )()
        await call.write(hello or Hello(MAJOR, "router-0", incarnation=42))
        return call


@pytest_asyncio.fixture(loop_scope="session")
async def steps() -> AsyncIterator[Fixture]:
    memory = Memory()
    streams = StepStreams(OURS, memory, GATHER_S)
    handler = grpc.stream_stream_rpc_method_handler(streams.serve, decoder(WorkerCommand), encode)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Steps": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Fixture(streams, memory, channel)
    await server.stop(None)


async def test_both_sides_say_hello_and_commands_arrive_in_order(steps: Fixture) -> None:
    call = await steps.open()
    assert await call.read() == OURS
    await call.write(SUBMIT)
    await call.write(Cancel("r1"))
    router, first = await steps.memory.commands.get()
    assert (router.router_id, first) == ("router-0", SUBMIT)
    assert await steps.memory.commands.get() == (router, "r1")
    call.cancel()


async def test_the_deltas_of_one_step_leave_in_one_message_with_the_load(steps: Fixture) -> None:
    call = await steps.open()
    await call.read()
    await call.write(SUBMIT)
    router, _ = await steps.memory.commands.get()
    deltas = [Delta("r1", [1]), Delta("r2", [2]), Delta("r3", [3], finish="stop")]
    for delta in deltas:
        router.send(delta)
    steps.streams.publish_load(WorkerLoad(running=2))
    assert await call.read() == StepMessage(deltas, WorkerLoad(running=2))
    call.cancel()


async def test_tokens_of_quick_steps_leave_together_and_the_first_and_the_last_do_not_wait(steps: Fixture) -> None:
    call = await steps.open()
    await call.read()
    await call.write(SUBMIT)
    router, _ = await steps.memory.commands.get()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    router.send(Delta("r1", [1], cached_tokens=0))
    assert (await call.read()).deltas == [Delta("r1", [1], cached_tokens=0)]
    for token in (2, 3, 4):
        router.send(Delta("r1", [token]))
        await asyncio.sleep(0)
    assert [delta.token_ids for delta in (await call.read()).deltas] == [[2, 3, 4]]
    assert loop.time() - began_s >= GATHER_S
    router.send(Delta("r1", [5]))
    router.send(Delta("r1", [6], finish="length"))
    assert [delta.token_ids for delta in (await call.read()).deltas] == [[5, 6]]
    call.cancel()


async def test_a_load_without_deltas_is_reported_too(steps: Fixture) -> None:
    call = await steps.open()
    await call.read()
    steps.streams.publish_load(WorkerLoad(waiting=1))
    assert await call.read() == StepMessage([], WorkerLoad(waiting=1))
    call.cancel()


@pytest.mark.parametrize("end", ["cancel", "half-close"])
async def test_a_router_that_leaves_is_reported(steps: Fixture, end: str) -> None:
    call = await steps.open()
    await call.read()
    await call.write(SUBMIT)
    router, _ = await steps.memory.commands.get()
    if end == "cancel":
        call.cancel()
    else:
        await call.done_writing()
    assert await asyncio.wait_for(steps.memory.gone.get(), 5) is router


@pytest.mark.parametrize(
    ("hello", "status", "detail"),
    [
        (Hello(MAJOR, "router-0", incarnation=41), grpc.StatusCode.FAILED_PRECONDITION, "incarnation 42, not 41"),
        (Hello(MAJOR + 1, "router-0"), grpc.StatusCode.FAILED_PRECONDITION, "version 2"),
        (Cancel("r1"), grpc.StatusCode.INVALID_ARGUMENT, "hello"),
    ],
)
async def test_a_wrong_hello_is_refused(steps: Fixture, hello: Any, status: grpc.StatusCode, detail: str) -> None:
    call = await steps.open(hello)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert refused.value.code() is status
    assert detail in (refused.value.details() or "")
    assert steps.memory.commands.empty()


async def test_a_malformed_command_ends_that_stream_alone(steps: Fixture) -> None:
    bad, good = await steps.open(), await steps.open()
    await bad.read()
    await good.read()
    await bad.write(b"\xc1 not msgpack")
    assert (await asyncio.wait_for(steps.memory.gone.get(), 5)).router_id == "router-0"
    await good.write(SUBMIT)
    assert (await steps.memory.commands.get())[1] == SUBMIT
    good.cancel()


async def test_closing_ends_the_stream_after_the_last_news(steps: Fixture) -> None:
    call = await steps.open()
    await call.read()
    await call.write(SUBMIT)
    router, _ = await steps.memory.commands.get()
    router.send(Delta("r1", finish="stop"))
    steps.streams.close()
    assert (await call.read()).deltas == [Delta("r1", finish="stop")]
    assert await call.read() is grpc.aio.EOF


async def test_the_news_of_one_request_join_in_order_and_end_as_the_last_of_them_does(steps: Fixture) -> None:
    call = await steps.open()
    await call.read()
    await call.write(SUBMIT)
    router, _ = await steps.memory.commands.get()
    handoff = Handoff("prefill-0", 3, 4096, "shm", 16)
    one, two, three = (TokenLogprobs(-float(token), [(token, -1.0)]) for token in (1, 2, 3))
    router.send(Delta("r1", [1], [one], cached_tokens=16, handoff=handoff))
    router.send(Delta("r2", [7]))
    router.send(Delta("r1", [2], [two]))
    router.send(Delta("r2", failure=Failure("internal", "broken", False)))
    router.send(Delta("r1", [3], [three], finish="stop", stop_token=3))
    assert (await call.read()).deltas == [
        Delta("r1", [1, 2, 3], [one, two, three], 16, handoff, "stop", 3),
        Delta("r2", [7], failure=Failure("internal", "broken", False)),
    ]
    call.cancel()
