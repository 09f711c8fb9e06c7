"""Eight streams at a time, over HTTP and gRPC, while something is done to the service: what each got, and its
pauses."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from runtime.calls.router import Client
from runtime.security.secret import Secret
from tests.spine.prompts import greedy

OVER_EACH = 4  # streams at a time
TIMEOUT_S = 120.0


@dataclass
class Load:
    """`answers`: prompt and tokens of each request that has ended."""

    answers: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    longest_pause_s: float = 0.0  # between two tokens of one stream
    longest_wait_s: float = 0.0  # for a first token

    @property
    def figures(self) -> str:
        pause_ms, wait_ms = 1e3 * self.longest_pause_s, 1e3 * self.longest_wait_s
        return f"{len(self.answers)} requests, longest pause {pause_ms:.0f} ms, longest wait {wait_ms:.0f} ms"


class Pace:
    """Notes when the tokens of one stream come."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._last_s = time.monotonic()
        self._begun = False

    def token(self) -> None:
        pause_s, self._last_s = time.monotonic() - self._last_s, time.monotonic()
        if self._begun:
            self._load.longest_pause_s = max(self._load.longest_pause_s, pause_s)
        else:
            self._load.longest_wait_s = max(self._load.longest_wait_s, pause_s)
        self._begun = True


@asynccontextmanager
async def steady_load(
    grpc: str, http: str, prompts: Callable[[int], list[int]], max_tokens: int, key: str, model: str = ""
) -> AsyncIterator[Load]:
    """`prompts`: the prompt of each request by its number. Every answer has `max_tokens`. `model`: which, of several. A
    request that fails fails the context, also one that has no end."""
    load, ending, numbers = Load(), asyncio.Event(), iter(range(10**9))

    async def over_grpc() -> None:
        async with Client(grpc, operator_key=Secret(key)) as client:
            while not ending.is_set():
                prompt, pace = prompts(next(numbers)), Pace(load)
                request = greedy(prompt, max_tokens, ignore_eos=True)
                request.model = model
                noted(prompt, (await client.generate(request, TIMEOUT_S, lambda _, pace=pace: pace.token())).token_ids)

    async def over_http() -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            while not ending.is_set():
                prompt, tokens, pace, done = prompts(next(numbers)), list[int](), Pace(load), False
                body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
                body |= {"stream": True, "return_token_ids": True, **({"model": model} if model else {})}
                async with client.stream("POST", f"http://{http}/v1/completions", json=body) as answer:
                    assert answer.status_code == 200, await answer.aread()
                    async for line in answer.aiter_lines():
                        done |= line == "data: [DONE]"
                        if line.startswith("data: {"):
                            event = json.loads(line.removeprefix("data: "))
                            assert "error" not in event, event
                            if new := [one for choice in event["choices"] for one in choice.get("token_ids") or ()]:
                                pace.token()
                                tokens += new
                assert done, "the stream broke off"
                noted(prompt, tokens)

    def noted(prompt: list[int], tokens: list[int]) -> None:
        assert len(tokens) == max_tokens, f"{len(tokens)} tokens of {max_tokens}"
        load.answers.append((tuple(prompt), tuple(tokens)))

    async with asyncio.TaskGroup() as group:
        for _ in range(OVER_EACH):
            group.create_task(over_grpc())
            group.create_task(over_http())
        try:
            yield load
        finally:
            ending.set()
