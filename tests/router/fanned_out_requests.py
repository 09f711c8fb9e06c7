"""`python -m tests.router.fanned_out_requests HTTP_PORT`: sends a request for each line of its input.

They are short, and each asks for a thousand answers, which once began on the router's event loop in one go.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx

from tests.router.hostile_requests import CHAT, COMPLETION

ORDINARY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the capital of France? " * 30}],
    "max_tokens": 3,
}
MANY: dict[str, Any] = {"prompt": ["a"] * 64, "n": 16, "max_tokens": 3}


def http_bodies() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(name, path, body)."""
    yield "answers", COMPLETION, MANY
    yield "streamed answers", COMPLETION, MANY | {"stream": True}
    yield "with biases", COMPLETION, MANY | {"logit_bias": {str(i): 1 for i in range(512)}}
    yield "with stop strings", COMPLETION, MANY | {"stop": [chr(97 + i) * 1024 for i in range(16)]}
    yield "with stop tokens", COMPLETION, MANY | {"stop_token_ids": list(range(100, 500))}
    yield "with a grammar", COMPLETION, MANY | {"guided_choice": ["x" * 100] * 100}
    yield "of long prompts", COMPLETION, MANY | {"prompt": ["relay " * 500] * 64}
    yield "of a chat", CHAT, {"messages": [{"role": "user", "content": "hi " * 100}], "n": 16, "max_tokens": 300}


async def answers(http: httpx.AsyncClient) -> AsyncIterator[str]:
    """What was sent and what came of it; each request is sent when the next item is asked for."""
    for _ in range(3):
        yield f"ordinary {(await http.post(CHAT, json=ORDINARY)).status_code}"
    for name, path, body in http_bodies():
        yield f"fanned out: {name} {(await http.post(path, content=json.dumps(body))).status_code}"


async def main(http_port: str) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=60) as http:
        async for line in answers(http):
            print(line, flush=True)
            await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
