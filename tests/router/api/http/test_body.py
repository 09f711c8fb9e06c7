import asyncio
import gzip
import json
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.types import Message

from router.api.http.server import HttpServer, serve_http
from router.requests.body_budget import FREE_BYTES, BodyBudget
from runtime.errors import UnavailableError
from runtime.side_lane import SideLane
from tests.no_collector import no_collector
from tests.router.api.conversations import app_of
from tests.router.http_client import COMPLETION
from tests.router.scripted_generator import ScriptedGenerator, make_frontend, tiny_tokenizer

BUDGET_BYTES = 400_000  # of which one tenant takes three quarters
OTHER_DOORS = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
LONG = json.dumps(COMPLETION | {"prompt": "a" * 1000, "user": "u" * 200_000}).encode()
NO_JSON = b'{"a' + b"a" * 1_000_000


@pytest.fixture
async def server(tiny_model: Path) -> AsyncIterator[HttpServer]:
    frontend = make_frontend(ScriptedGenerator(tiny_tokenizer(tiny_model)))
    app = app_of(replace(frontend, bodies=BodyBudget(BUDGET_BYTES)))
    async with await serve_http(app, "127.0.0.1", 0) as server:
        yield server


async def begin(server: HttpServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """All of a long body but its last byte."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(LONG) + LONG[:-1])
    await writer.drain()
    return reader, writer


async def test_long_bodies_share_a_budget_and_short_ones_need_none(server: HttpServer) -> None:
    held = [await begin(server) for _ in range(3)]
    done, waiting = await asyncio.wait(
        [asyncio.create_task(reader.readuntil(b"\r\n\r\n")) for reader, _ in held],
        return_when=asyncio.FIRST_COMPLETED,
        timeout=60,
    )
    (refused,) = done
    assert refused.result().startswith(b"HTTP/1.1 503 ")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as http:
        answer = await http.post("/v1/completions", json=COMPLETION)
        assert answer.status_code == 200, "a short request goes past"
        refusal = await http.post("/v1/completions", content=LONG)
        assert refusal.status_code == 503
        assert "fill the 400000 bytes for all of them (32 times router.max_body_bytes); try again later" in refusal.text
        for door in OTHER_DOORS:
            assert (await http.post(door, content=LONG)).status_code == 503, "all doors share the budget"
        for _, writer in held:
            writer.write(LONG[-1:])
        for answered in await asyncio.wait_for(asyncio.gather(*waiting), 60):
            assert answered.startswith(b"HTTP/1.1 200 ")
        for _ in range(3):  # what the refused and the answered ones held is free again
            assert (await http.post("/v1/completions", content=LONG)).status_code == 200
    for _, writer in held:
        writer.close()


def test_what_a_body_has_grown_by_is_given_back_however_it_ends() -> None:
    budget = BodyBudget(1000)
    with budget.hold() as first, budget.hold() as second:
        first.grow(FREE_BYTES)
        first.grow(750)
        second.grow(FREE_BYTES)
        with pytest.raises(UnavailableError):
            second.grow(1)
        first.become(FREE_BYTES + 500)
        second.grow(250)
    with budget.hold() as third:
        third.grow(FREE_BYTES + 750)


def test_no_tenant_takes_the_whole_budget_however_many_bodies_it_sends() -> None:
    budget = BodyBudget(1000)
    with budget.hold("a") as one, budget.hold("a") as other, budget.hold("b") as of_b, budget.hold("c") as of_c:
        one.grow(FREE_BYTES + 600)
        other.grow(FREE_BYTES + 150)
        with pytest.raises(UnavailableError):
            other.grow(1)
        of_b.grow(FREE_BYTES + 180)
        of_c.grow(FREE_BYTES + 50)
        other.become(0)
        of_b.grow(20)


@pytest.mark.parametrize("path", ["/v1/completions", *OTHER_DOORS])
async def test_a_body_that_is_compressed_is_refused_as_such(server: HttpServer, path: str) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as http:
        told = {"content-encoding": "gzip"}
        refused = await http.post(path, content=gzip.compress(json.dumps(COMPLETION).encode()), headers=told)
        taken = await http.post(path, content=b"{", headers={"content-encoding": "identity"})
    assert refused.status_code == 400
    assert "content-encoding: is 'gzip'; send the body as it is" in refused.json()["error"]["message"]
    assert "content-encoding" not in taken.json()["error"]["message"]


class Refused:
    """A request whose long body is no JSON. `held`: bytes of memory in use at each part of its answer. `lane`: has
    one thread, which has let go of the body when it takes other work."""

    def __init__(self, path: str, lane: SideLane, held: list[int]) -> None:
        self.scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "root_path": "",
            "query_string": b"",
            "headers": [],
        }
        self._lane = lane
        self._held = held
        self._asked = False

    async def receive(self) -> Message:
        if self._asked:
            await asyncio.Event().wait()
        self._asked = True
        return {"type": "http.request", "body": NO_JSON, "more_body": False}

    async def send(self, message: Message) -> None:
        assert message.get("status", 400) == 400
        await self._lane.run(None, int)
        self._held.append(tracemalloc.get_traced_memory()[0])


@pytest.mark.parametrize("path", ["/v1/completions", *OTHER_DOORS])
async def test_a_body_that_is_refused_is_gone_before_its_answer_and_needs_no_collector(
    tiny_model: Path, path: str
) -> None:
    lane, held = SideLane(threads=1), list[int]()
    app = app_of(replace(make_frontend(ScriptedGenerator(tiny_tokenizer(tiny_model))), lane=lane))

    async def ask() -> None:
        refused = Refused(path, lane, held)
        await app(refused.scope, refused.receive, refused.send)

    await ask()
    held.clear()
    with no_collector():
        for _ in range(3):
            await ask()
    assert max(held) < len(NO_JSON) / 2
