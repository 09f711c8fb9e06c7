"""Requests at a server that breaks in ways that a real one cannot be made to."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from aiohttp import web

from baton_proto.images import Seen
from engine.vllm.server import server as server_module
from engine.vllm.server.completion import Completion, Item
from engine.vllm.server.core import CUT_SHORT, ServerCore
from engine.vllm.server.image_prompt import BLIND
from engine.vllm.server.ranks import Rank
from engine.vllm.server.server import VllmServer
from engine.vllm.server.watch import ServerWatch
from runtime.errors import UnavailableError
from tests.engine.vllm.server.imitation import Imitation, Say

TOKEN = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null,"token_ids":[5]}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"text":"b","finish_reason":"length","token_ids":[6,7]}]}\n\ndata: [DONE]\n\n'
ASKED = Completion("r", b"{}")


def saying(*parts: bytes, then_break: bool = False) -> Say:
    async def say(answer: web.StreamResponse) -> None:
        for part in parts:
            await answer.write(part)
        if then_break:
            assert answer._req is not None
            assert answer._req.transport is not None
            answer._req.transport.abort()

    return say


async def forever(answer: web.StreamResponse) -> None:
    await answer.write(TOKEN)
    await asyncio.Event().wait()


@asynccontextmanager
async def asked(say: Say, completion: Completion = ASKED) -> AsyncIterator[tuple[Imitation, ServerCore]]:
    """A server that was asked for one completion."""
    async with (
        Imitation(say).serving() as imitation,
        VllmServer(imitation.worker) as server,
        ServerWatch(server) as watch,
        ServerCore(server, watch, Rank(0, 728, "", "")) as core,
    ):
        await core.add_request_async(completion)
        yield imitation, core


async def until_finished(core: ServerCore) -> list[Item]:
    items: list[Item] = []
    async with asyncio.timeout(60):
        while not items or items[-1].finish_reason is None:
            items += (await core.get_output_async()).outputs
    return items


async def test_tokens_come_as_the_server_sends_them_wherever_its_parts_are_cut() -> None:
    whole = TOKEN + TOKEN + LAST
    async with asked(saying(whole[:50], whole[50:200], whole[200:])) as (_, core):
        items = await until_finished(core)
    assert [list(item.new_token_ids) for item in items] == [[5], [5], [6, 7]]
    assert items[-1].finish_reason == "length"


async def test_a_connection_takes_another_request_when_an_answer_is_over() -> None:
    """Also when its body ends later than its events."""
    may_end = asyncio.Event()

    async def say(answer: web.StreamResponse) -> None:
        await answer.write(LAST)
        await may_end.wait()

    async with asked(say) as (imitation, core), asyncio.timeout(10):
        await until_finished(core)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await imitation.gone.wait()
        may_end.set()
        while len(imitation.clients) == len(set(imitation.clients)):
            await core.add_request_async(Completion(f"r{len(imitation.clients)}", b"{}"))
            await until_finished(core)


@pytest.mark.parametrize(
    ("say", "reason"),
    [
        (saying(TOKEN, then_break=True), "no vLLM at"),
        (saying(TOKEN), CUT_SHORT),
        (saying(TOKEN, b"data: [DONE]\n\n"), CUT_SHORT),
        (saying(TOKEN, b'data: {"error":{"message":"the engine is tired","code":500}}\n\n'), "the engine is tired"),
        (saying(b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'), "does not know `return_token_ids`"),
        (saying(b"data: <html>\n\n"), "<html>"),
    ],
)
async def test_a_request_that_breaks_ends_with_a_reason_while_the_server_goes_on(say: Say, reason: str) -> None:
    async with asked(say) as (imitation, core):
        broken = await until_finished(core)
        assert reason in str(broken[-1].finish_reason)
        imitation.say = saying(LAST)
        await core.add_request_async(Completion("next", b"{}"))
        assert (await until_finished(core))[-1].finish_reason == "length"


@pytest.mark.parametrize(("status", "refused"), [(400, True), (422, True), (401, False), (503, False)])
@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_request_that_the_server_refuses_says_whether_the_request_is_wrong(
    status: int, refused: bool, has_begun: bool
) -> None:
    """Also when the server finds out behind a status of 200: then the error has the place of a chunk."""
    problem = "max_tokens is too large"
    event = b'data: {"error":{"message":"%s","type":"BadRequestError","param":null,"code":%d}}\n\ndata: [DONE]\n\n'
    async with asked(saying(LAST)) as (imitation, core):
        await until_finished(core)
        imitation.refuses = None if has_begun else (status, problem)
        imitation.say = saying(event % (problem.encode(), status))
        await core.add_request_async(Completion("next", b"{}"))
        (last,) = await until_finished(core)
    assert (last.finish_reason, last.refused) == (problem, refused)


@pytest.mark.parametrize("adapter", ["", "sql"])
async def test_an_adapter_that_the_server_has_no_more_may_be_had_elsewhere(adapter: str) -> None:
    async with asked(saying(LAST)) as (imitation, core):
        await until_finished(core)
        imitation.refuses = (404, "The model `sql` does not exist.")
        await core.add_request_async(Completion("next", b"{}", adapter=adapter))
        (last,) = await until_finished(core)
    assert last.refused == bool(adapter)


async def test_an_event_without_end_is_no_more_memory_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_EVENT_BYTES", 1000)
    async with asked(saying(b"data: " + b"x" * 100_000)) as (_, core):
        assert "an event of more than 1000 bytes" in str((await until_finished(core))[-1].finish_reason)


async def test_a_stream_that_breaks_with_its_server_tells_of_the_server_first() -> None:
    async with asked(forever) as (imitation, core):
        async with asyncio.timeout(60):
            while not (await core.get_output_async()).outputs:
                pass
        imitation.is_healthy = False
        imitation.say = saying(TOKEN, then_break=True)
        await core.add_request_async(Completion("next", b"{}"))
        with pytest.raises(UnavailableError):
            await until_finished(core)


async def test_a_server_that_says_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "ANSWER_TIMEOUT_S", 0.2)
    async with asked(forever) as (imitation, core):
        imitation.hangs = True
        with pytest.raises(UnavailableError, match=r"says nothing for 0\.2 s"):
            await until_finished(core)


async def test_an_abort_closes_the_connection_so_that_the_server_computes_no_more() -> None:
    async with asked(forever) as (imitation, core):
        async with asyncio.timeout(60):
            while not (await core.get_output_async()).outputs:
                pass
            await core.abort_requests_async(["r"])
            await imitation.gone.wait()


async def test_what_others_do_at_the_server_is_told() -> None:
    async with asked(forever) as (_, core):
        async with asyncio.timeout(60):
            while (stats := (await core.get_output_async()).scheduler_stats) is None:
                pass
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage) == (3, 1, 0.25)


async def test_a_server_that_leaves_images_out_of_the_prompt_is_refused_before_its_first_token() -> None:
    blind = b'data: {"choices":[{"index":0,"token_ids":[5]}],"prompt_token_ids":[1,2]}\n\n'
    async with asked(saying(blind, LAST), Completion("r", b"{}", num_images=1)) as (_, core):
        (item,) = await until_finished(core)
    assert (item.finish_reason, item.refused, list(item.new_token_ids)) == (BLIND, True, [])


async def test_the_prompt_with_its_images_comes_with_the_first_token() -> None:
    """Without the tokens of the answer that the client has."""
    first = b'data: {"choices":[{"index":0,"token_ids":[5]}],"prompt_token_ids":[1,2,2,3,4],"mm_placeholders":{"image":'
    first += b'[{"offset":1,"length":2}]}}\n\n'
    async with asked(saying(first, LAST), Completion("r", b"{}", num_images=1, num_replayed=1)) as (_, core):
        items = await until_finished(core)
    assert [item.seen for item in items] == [Seen(np.array([1, 2, 2, 3], "<u4").tobytes(), [(1, 2)]), None]


async def test_a_server_without_the_endpoint_for_images_cannot_serve_them() -> None:
    async with asked(saying(LAST)) as (imitation, core):
        await until_finished(core)
        imitation.refuses = (403, "Restart it")
        for num_images in (1, 0):
            await core.add_request_async(Completion("next", b"{}", num_images=num_images))
            (last,) = await until_finished(core)
            assert (last.finish_reason, last.refused) == ("Restart it", bool(num_images))
