"""What the live page's paths answer, and to whom."""

import asyncio
import base64
import contextlib
import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.api.http.server import serve_http
from router.api.serving.app import create_app
from router.counters.tally import RequestTally
from router.ui import feed as feed_module
from runtime.security.bearer_keys import BearerKeys
from runtime.security.secret import Secret
from tests.router.scripted_generator import ScriptedGenerator, make_frontend, tiny_tokenizer
from tests.router.ui.crowd import Crowd, NothingExplained

OPERATOR, API = "o" * 32, "a" * 32
ASKING = ("/ui/events", "/ui/tree", "/ui/requests/mine")


@asynccontextmanager
async def serving(
    tiny_model: Path, crowd: Crowd | None, operators: tuple[str, ...] = (OPERATOR,)
) -> AsyncIterator[Any]:
    frontend = make_frontend(ScriptedGenerator(tiny_tokenizer(tiny_model), ["Yes."]))
    routes = [] if crowd is None else crowd.endpoints([Secret(key) for key in operators]).routes()
    app = create_app(frontend, lambda: b"", keys=BearerKeys.plain([Secret(API)]), operators_routes=routes)
    async with (
        await serve_http(app, "127.0.0.1", 0) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as http,
    ):
        yield http


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_the_page_needs_no_key_holds_no_key_and_may_load_nothing_from_elsewhere(tiny_model: Path) -> None:
    async with serving(tiny_model, Crowd(1, 1)) as http:
        answer = await http.get("/ui")
    assert answer.status_code == 200
    assert OPERATOR not in answer.text
    assert not re.findall(r"""(?:src|href)=|url\(|@import|innerHTML|https?://""", answer.text)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; connect-src 'self'")
    for name in ("script", "style"):
        (body,) = re.findall(f"<{name}>(.*?)</{name}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ASKING)
async def test_all_else_asks_for_an_operators_key(tiny_model: Path, path: str) -> None:
    async with serving(tiny_model, Crowd(1, 1)) as http:
        for headers, words in (({}, "the operator key is missing"), (bearer(API), "this is not the operator key")):
            answer = await http.get(path, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_operator_key"
            assert words in answer.json()["error"]["message"]


async def test_an_operators_key_opens_nothing_else(tiny_model: Path) -> None:
    async with serving(tiny_model, Crowd(1, 1)) as http:
        assert (await http.get("/v1/models", headers=bearer(OPERATOR))).status_code == 401
        assert (await http.get("/uiv1", headers=bearer(OPERATOR))).status_code == 401


async def test_without_operators_keys_nobody_is_let_in(tiny_model: Path) -> None:
    async with serving(tiny_model, Crowd(1, 1), operators=()) as http:
        assert (await http.get("/ui/tree", headers=bearer(API))).status_code == 401
        assert (await http.get("/ui/tree")).status_code == 401
    async with serving(tiny_model, Crowd(1, 1)) as http:
        assert (await http.get("/ui/tree", headers=bearer(OPERATOR))).json()["runs"] == []


async def test_the_stream_is_one_of_server_sent_events(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "INTERVAL_S", 0.02)
    crowd = Crowd(1, 1)
    await crowd.feed.start()
    async with serving(tiny_model, crowd) as http, http.stream("GET", "/ui/events", headers=bearer(OPERATOR)) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith('data: {"time_s":')
        assert await anext(lines) == ""
        await crowd.feed.close()
        async for line in lines:
            assert not line or line.startswith("data: ")


async def test_who_asks_for_the_heads_alone_watches_nothing(tiny_model: Path) -> None:
    """The next request on the same connection is answered."""
    async with serving(tiny_model, Crowd(1, 1)) as http:
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        head = f"HEAD /ui/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {OPERATOR}\r\n\r\n"
        writer.write(head.encode() + b"GET /ui HTTP/1.1\r\nhost: x\r\n\r\n")
        answers = await asyncio.wait_for(reader.readuntil(b"<!doctype html>"), 60)
        writer.close()
    assert answers.count(b"HTTP/1.1 200 OK") == 2


async def test_one_viewer_too_many_is_told_so(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_VIEWERS", 0)
    async with serving(tiny_model, Crowd(1, 1)) as http:
        answer = await http.get("/ui/events", headers=bearer(OPERATOR))
    assert answer.status_code == 503
    assert "viewers" in answer.json()["error"]["message"]


async def test_a_viewer_who_reads_nothing_loses_its_connection_to_who_comes(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "MAX_VIEWERS", 1)
    monkeypatch.setattr(feed_module, "SETTLED_S", 0.0)
    crowd = Crowd(1, 1)
    async with serving(tiny_model, crowd) as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
        writer.write(f"GET /ui/events HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {OPERATOR}\r\n\r\n".encode())
        await asyncio.wait_for(reader.readuntil(b"text/event-stream"), 60)
        while not crowd.feed.full:
            await asyncio.sleep(0.01)
        async with http.stream("GET", "/ui/events", headers=bearer(OPERATOR)) as answer:
            assert answer.status_code == 200
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 60)
        writer.close()


async def test_an_unknown_request_is_not_found_and_a_known_one_is_told(tiny_model: Path) -> None:
    crowd = Crowd(1, 1, explainer=NothingExplained())  # type: ignore[arg-type]
    with RequestTally(crowd.metrics, "a/b?c-0123abcd", 5):
        pass
    async with serving(tiny_model, crowd) as http:
        assert (await http.get("/ui/requests/nobody", headers=bearer(OPERATOR))).status_code == 404
        answer = await http.get("/ui/requests/a%2Fb%3Fc", headers=bearer(OPERATOR))
    assert "a/b?c-0123abcd" in answer.json()["line"]


async def test_a_router_without_the_page_has_none_of_its_paths(tiny_model: Path) -> None:
    async with serving(tiny_model, None) as http:
        for path in ("/ui", *ASKING):
            assert (await http.get(path, headers=bearer(API))).status_code == 404
