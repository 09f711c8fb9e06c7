"""What tests of the HTTP API ask, and how they read streams."""

import json
from typing import Any

import httpx

from tests.router.scripted_generator import MODEL

USER: Any = [{"role": "user", "content": "What is the capital of France?"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": USER}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "What is"}


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    async with http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        text = "".join([chunk async for chunk in response.aiter_text()])
    assert text.endswith("\n\n")
    lines = [line.removeprefix("data: ") for line in text.removesuffix("\n\n").split("\n\n")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
