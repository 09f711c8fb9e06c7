"""What holds in each dialect of HTTP, whatever its bodies and answers look like."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.config.serving import RouterConfig
from runtime.errors import OverloadedError, UnavailableError
from tests.router.api.conversations import serving, talking_frontend
from tests.router.http_client import USER
from tests.router.scripted_generator import ScriptedGenerator

UNKNOWN = {"x": 1}
DIALECTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": (
        {"messages": USER},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"} | UNKNOWN]} | UNKNOWN]},
    ),
    "/v1/completions": ({"prompt": "a"}, {"stream_options": {"include_usage": True} | UNKNOWN, "stream": True}),
    "/v1/responses": (
        {"input": "a"},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"} | UNKNOWN]} | UNKNOWN]},
    ),
    "/v1/messages": (
        {"messages": USER, "max_tokens": 500},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"} | UNKNOWN]} | UNKNOWN]},
    ),
}
EACH = pytest.mark.parametrize("path", DIALECTS)


@EACH
async def test_a_model_that_is_not_served_is_not_found(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.post(path, json=DIALECTS[path][0] | {"model": "another"})
    assert answer.status_code == 404
    assert "'another' is not served here" in answer.json()["error"]["message"]


@EACH
async def test_unknown_fields_are_ignored_everywhere_where_the_router_says_so(
    generator: ScriptedGenerator, folder: Path, path: str
) -> None:
    body, with_unknown = DIALECTS[path]
    for unknown_fields in ("ignore", "refuse"):
        frontend: Any = replace(talking_frontend(generator, folder), config=RouterConfig(unknown_fields=unknown_fields))
        async with serving(frontend) as server, httpx.AsyncClient(timeout=60) as http:
            answer = await http.post(f"http://127.0.0.1:{server.port}{path}", json=body | with_unknown | UNKNOWN)
        refused = unknown_fields == "refuse" and path != "/v1/responses"  # which warns of them
        assert answer.status_code == (400 if refused else 200), answer.text


@EACH
async def test_errors_have_a_status_before_the_first_event_and_an_event_after_it(
    http: httpx.AsyncClient, generator: ScriptedGenerator, path: str
) -> None:
    body = DIALECTS[path][0]
    generator.error = OverloadedError("queue", 1, 2.0)
    assert (await http.post(path, json=body | {"stream": True})).status_code == 429
    generator.error, generator.error_at = UnavailableError("all workers are gone"), 5
    assert (await http.post(path, json=body)).status_code == 503
    streamed = await http.post(path, json=body | {"stream": True})
    assert streamed.status_code == 200
    assert "all workers are gone" in streamed.text.removesuffix("\n\n").rpartition("\n\n")[2]


@EACH
async def test_a_client_that_leaves_ends_the_work(
    http: httpx.AsyncClient, generator: ScriptedGenerator, path: str
) -> None:
    generator.stuck_at = 4
    async with http.stream("POST", path, json=DIALECTS[path][0] | {"stream": True}) as answer:
        await anext(answer.aiter_bytes())
    async with asyncio.timeout(60):
        await generator.cancelled.wait()
