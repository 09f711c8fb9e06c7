"""The steps stream over real sockets, with a handler that only remembers."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from baton_proto.decoding import decoder
from baton_proto.discovery import WorkerLoad
from baton_proto.sampling import SamplingParams, TokenLogprobs
from baton_proto.token_counts import TokenCounts
from baton_proto.worker import (
    MAJOR,
    STEPS,
    Cancel,
    Delta,
    Failure,
    Handoff,
    Hello,
    StepMessage,
    Submit,
    WorkerReport,
    decode_greeting,
)
from runtime.errors import ProtocolError
from runtime.streams.message_stream import ENDED, MessageStream, dial
from tests.clock import Clock
from worker.gathered_steps import gather_s
from worker.step_stream import RouterStream, StepStreams
from worker.stream_server import StreamServer

LOAD = WorkerLoad(running=2)
GATHER_S = 0.05
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
    address: str
    opened: list[MessageStream] = field(default_factory=list)

    async def open(self, name: str = "router-0") -> "Router":
        stream = await dial(self.address, "decode-0")
        self.opened.append(stream)
        stream.send(Hello(MAJOR, name, incarnation=42))
        assert await stream.receive(decode_greeting) == OURS
        return Router(stream)


@dataclass
class Router:
    """The other end."""

    stream: MessageStream

    @property
    def transport(self) -> asyncio.Transport:
        assert self.stream._transport is not None
        return self.stream._transport

    async def read(self) -> StepMessage:
        async with asyncio.timeout(30):
            message = await self.stream.receive(decoder(WorkerReport))
        assert isinstance(message, StepMessage)
        return message


@pytest_asyncio.fixture
async def steps() -> AsyncIterator[Fixture]:
    memory = Memory()
    streams = StepStreams(memory, GATHER_S, lambda: LOAD)
    server = StreamServer(OURS, {STEPS: streams.serve})
    fixture = Fixture(streams, memory, await server.start("127.0.0.1"))
    yield fixture
    for stream in fixture.opened:
        stream.abort("the test is over")
    await server.stop(1.0)


async def test_both_sides_say_hello_and_commands_arrive_in_order(steps: Fixture) -> None:
    call = await steps.open()
    call.stream.send(SUBMIT)
    call.stream.send(Cancel("r1"))
    router, first = await steps.memory.commands.get()
    assert (router.router_id, first) == ("router-0", SUBMIT)
    assert await steps.memory.commands.get() == (router, "r1")


async def test_the_deltas_of_one_step_leave_in_one_message_with_the_load(steps: Fixture) -> None:
    call = await steps.open()
    call.stream.send(SUBMIT)
    router, _ = await steps.memory.commands.get()
    deltas = [Delta("r1", [1]), Delta("r2", [2]), Delta("r3", [3], finish="stop")]
    for delta in deltas:
        router.send(delta)
    steps.streams.step_is_over()
    assert await call.read() == StepMessage(deltas, LOAD)


async def test_tokens_of_quick_steps_leave_together_and_the_first_and_the_last_do_not_wait(steps: Fixture) -> None:
    call = await steps.open()
    call.stream.send(SUBMIT)
    router, _ = await steps.memory.commands.get()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    router.send(Delta("r1", [1], prompt_counts=TokenCounts()))
    assert (await call.read()).deltas == [Delta("r1", [1], prompt_counts=TokenCounts())]
    for token in (2, 3, 4):
        router.send(Delta("r1", [token]))
        await asyncio.sleep(0)
    assert [delta.token_ids for delta in (await call.read()).deltas] == [[2, 3, 4]]
    assert loop.time() - began_s >= gather_s(GATHER_S, 1)
    router.send(Delta("r1", [5]))
    router.send(Delta("r1", [6], finish="length"))
    assert [delta.token_ids for delta in (await call.read()).deltas] == [[5, 6]]


async def test_a_request_that_ends_hurries_the_news_of_no_other(steps: Fixture, clock: Clock) -> None:
    call = await steps.open()
    call.stream.send(SUBMIT)
    router, _ = await steps.memory.commands.get()
    router.send(Delta("r1", [1], prompt_counts=TokenCounts()))
    steps.streams.step_is_over()
    for token in (2, 3):
        router.send(Delta("r1", [token]))
        router.send(Delta("r2", [token], finish=None if token == 2 else "stop"))
        steps.streams.step_is_over()
    assert [delta.token_ids for delta in (await call.read()).deltas] == [[1]]
    hurried = await call.read()
    assert [(delta.request_id, delta.token_ids) for delta in hurried.deltas] == [("r2", [2, 3])]
    router.send(Delta("r3", [4], finish="stop"))
    assert [delta.request_id for delta in (await call.read()).deltas] == ["r3"], "r1 has not left right behind r2"
    clock.now_s += GATHER_S
    assert [(delta.request_id, delta.token_ids) for delta in (await call.read()).deltas] == [("r1", [2, 3])]


async def test_a_load_without_deltas_is_reported_too(steps: Fixture) -> None:
    call = await steps.open()
    steps.streams.step_is_over()
    assert await call.read() == StepMessage([], LOAD)


async def test_a_load_without_deltas_leaves_although_the_timer_rings_early(
    steps: Fixture, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As uvloop's do: they count whole milliseconds."""
    call, loop = await steps.open(), asyncio.get_running_loop()
    call.stream.send(SUBMIT)
    await steps.memory.commands.get()
    steps.streams.step_is_over()
    assert await call.read() == StepMessage([], LOAD)
    call_at = loop.call_at
    monkeypatch.setattr(loop, "call_at", lambda when_s, *what: call_at(when_s - 0.0004, *what))
    steps.streams.step_is_over()
    clock.now_s += GATHER_S - 0.0003
    assert await call.read() == StepMessage([], LOAD)


@pytest.mark.parametrize("end", ["abort", "close"])
async def test_a_router_that_leaves_is_reported(steps: Fixture, end: str) -> None:
    call = await steps.open()
    call.stream.send(SUBMIT)
    router, _ = await steps.memory.commands.get()
    if end == "abort":
        call.stream.abort("gone")
    else:
        call.stream.close()
    assert await asyncio.wait_for(steps.memory.gone.get(), 30) is router


async def test_a_malformed_command_ends_that_stream_alone(steps: Fixture) -> None:
    bad, good = await steps.open("bad"), await steps.open("good")
    bad.stream.send(Failure("no", "command", False))
    assert (await asyncio.wait_for(steps.memory.gone.get(), 30)).router_id == "bad"
    with pytest.raises(ProtocolError, match="cannot be decoded"):
        await bad.read()
    good.stream.send(SUBMIT)
    assert (await steps.memory.commands.get())[1] == SUBMIT


async def test_a_router_that_does_not_read_gets_all_news_joined_when_it_reads_again(steps: Fixture) -> None:
    """What waits for it is bounded by what its requests say, not by how long it sleeps."""
    call = await steps.open()
    call.stream.send(SUBMIT)
    router, _ = await steps.memory.commands.get()
    call.transport.pause_reading()
    sent = 0
    while router.writable:
        router.send(Delta("r1", list(range(sent, sent + 10_000)), prompt_counts=TokenCounts()))
        sent += 10_000
        await asyncio.sleep(0)
    for token in range(sent, sent + 100):
        router.send(Delta("r1", [token], prompt_counts=TokenCounts()))
        await asyncio.sleep(0)
    router.send(Delta("r1", [sent + 100], finish="length"))
    call.transport.resume_reading()
    messages = [await call.read()]
    while messages[-1].deltas[-1].finish is None:
        messages.append(await call.read())
    tokens = [token for message in messages for delta in message.deltas for token in delta.token_ids]
    assert tokens == list(range(sent + 101))
    assert messages[-1].deltas[-1].token_ids[-101:] == list(range(sent, sent + 101)), "in one message"


async def test_closing_ends_the_stream_after_the_last_news(steps: Fixture) -> None:
    call = await steps.open()
    call.stream.send(SUBMIT)
    router, _ = await steps.memory.commands.get()
    router.send(Delta("r1", finish="stop"))
    steps.streams.close()
    assert (await call.read()).deltas == [Delta("r1", finish="stop")]
    assert await asyncio.wait_for(call.stream.ended(), 30) == ENDED


async def test_the_news_of_one_request_join_in_order_and_end_as_the_last_of_them_does(steps: Fixture) -> None:
    call = await steps.open()
    call.stream.send(SUBMIT)
    router, _ = await steps.memory.commands.get()
    handoff = Handoff("prefill-0", 3, 4096, "shm", TokenCounts(cached_tokens=16))
    one, two, three = (TokenLogprobs(-float(token), [(token, -1.0)]) for token in (1, 2, 3))
    router.send(Delta("r1", [1], [one], prompt_counts=TokenCounts(cached_tokens=16), handoff=handoff, weights=5))
    router.send(Delta("r2", [7]))
    router.send(Delta("r1", [2], [two]))
    router.send(Delta("r2", failure=Failure("internal", "broken", False)))
    router.send(Delta("r1", [3], [three], finish="stop", stop_token=3))
    assert (await call.read()).deltas == [
        Delta("r1", [1, 2, 3], [one, two, three], TokenCounts(cached_tokens=16), handoff, "stop", 3, weights=5),
        Delta("r2", [7], failure=Failure("internal", "broken", False)),
    ]


async def test_a_stream_whose_handler_fails_is_closed() -> None:
    async def fail(stream: MessageStream, peer: str) -> None:
        raise OSError("no space left on device")

    server = StreamServer(OURS, {STEPS: fail})
    stream = await dial(await server.start("127.0.0.1"), "decode-0")
    stream.send(Hello(MAJOR, "router-0", incarnation=42))
    assert await stream.receive(decode_greeting) == OURS
    await asyncio.wait_for(stream.ended(), 60)
    await server.stop(1.0)


async def test_tokens_join_what_of_their_request_has_not_left(steps: Fixture) -> None:
    call = await steps.open()
    call.stream.send(SUBMIT)
    router, _ = await steps.memory.commands.get()
    first = Delta("r1", [1], prompt_counts=TokenCounts(cached_tokens=3))
    router.send(first)
    router.send_tokens("r1", [2])
    router.send(Delta("r2", [5], [TokenLogprobs(-1.0, [])]))
    router.send_tokens("r2", [6])
    router.send_tokens("r2", [7])
    router.send_tokens("r3", [8])
    router.send(Delta("r3", [9], finish="stop"))
    steps.streams.step_is_over()
    deltas = {delta.request_id: delta for delta in (await call.read()).deltas}
    assert deltas["r1"] == Delta("r1", [1, 2], prompt_counts=TokenCounts(cached_tokens=3))
    assert (deltas["r2"].token_ids, len(deltas["r2"].logprobs)) == ([5, 6, 7], 1)
    assert deltas["r3"] == Delta("r3", [8, 9], finish="stop")
    router.send_tokens("r1", [3])
    assert (await call.read()).deltas == [Delta("r1", [3])]
