"""Streamed requests to an address that speaks OpenAI's API, with the time of each event.

Chunks are read as they come, and split into events here: what is measured may share this machine's CPU.
"""

import asyncio
import io
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec
from msgspec import Struct

from baton.bench.measured import Timing
from baton.bench.workload import Ask
from runtime.errors import ConfigError, UnavailableError

ENDED = b"[DONE]"
IDLE_S = 4.0  # for which a connection is kept; servers close theirs after 5 s


class Delta(Struct):
    content: str | None = None


class ChunkChoice(Struct):
    text: str | None = None  # of completions
    delta: Delta | None = None  # of chats


class ChunkUsage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(Struct):
    choices: list[ChunkChoice] = []
    usage: ChunkUsage | None = None


class ModelName(Struct):
    id: str


class ModelList(Struct):
    data: list[ModelName]


_chunk = msgspec.json.Decoder(Chunk)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What every request asks for."""

    model: str
    chat: bool
    temperature: float
    ignore_eos: bool  # not OpenAI's own; vLLM, SGLang and Baton know it
    timeout_s: float


class Endpoint:
    """An async context manager. `url`: http(s)://HOST:PORT, with or without /v1. Raises ConfigError."""

    def __init__(self, url: str, api_key: str | None, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("--address", f"{url!r} is no URL such as http://127.0.0.1:8000")
        self.url = url
        self._base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}/v1"
        self._tls = tls or True
        self._headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, ssl=self._tls),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._session.close()

    async def models(self) -> list[str]:
        """Raises UnavailableError."""
        answer = b"".join([data async for data in self._chunks("GET", "models", None)])
        try:
            return [model.id for model in msgspec.json.decode(answer, type=ModelList).data]
        except msgspec.DecodeError as error:
            raise UnavailableError(f"{self.url} lists no models: {answer[:200]!r}") from error

    async def ask(self, ask: Ask, wishes: Wishes) -> Timing:
        """Raises nothing: the timing has the problem."""
        path, body = _request(ask, wishes)
        timing = Timing(time.perf_counter())
        try:
            async with asyncio.timeout(wishes.timeout_s):
                await self._read(path, body, timing)
        except TimeoutError:
            timing.problem = f"no whole answer within {wishes.timeout_s:g} s"
        except UnavailableError as error:
            timing.problem = str(error)
        timing.ended_s = time.perf_counter()
        if not timing.problem and not timing.output_tokens:
            timing.problem = "an answer without usage or tokens"
        return timing

    async def _read(self, path: str, body: bytes, timing: Timing) -> None:
        """Raises UnavailableError."""
        rest = b""
        async for data in self._chunks("POST", path, body):
            now_s = time.perf_counter()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and (event := line[5:].strip()) != ENDED:
                    _take(event, now_s, timing)

    async def _chunks(self, method: str, path: str, body: bytes | None) -> AsyncIterator[bytes]:
        """The answer's body as it comes. Raises UnavailableError, also when the status is not 200."""
        headers = {"Content-Type": "application/json"} if body else None
        data = io.BytesIO(body) if body else None  # aiohttp warns of bytes above 1 MB
        try:
            async with self._session.request(method, f"{self._base}/{path}", data=data, headers=headers) as answer:
                if answer.status != 200:
                    said = (await answer.read())[:500].decode(errors="replace")
                    raise UnavailableError(f"{self.url} answers {answer.status}: {said}")
                async for chunk in answer.content.iter_any():
                    yield chunk
        except aiohttp.ClientConnectorCertificateError as error:
            problem = f"{self.url} shows a certificate that --ca-file does not vouch for: {error.certificate_error}"
            raise UnavailableError(problem) from error
        except aiohttp.ClientConnectorError as error:
            raise UnavailableError(f"nothing answers at {self.url}: {error.os_error.strerror or error}") from error
        except aiohttp.ClientError as error:
            raise UnavailableError(f"{self.url}: {error or type(error).__name__}") from error


def _request(ask: Ask, wishes: Wishes) -> tuple[str, bytes]:
    """Path and body."""
    body: dict[str, Any] = {
        "model": wishes.model,
        "max_tokens": ask.output_tokens,
        "temperature": wishes.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= {"ignore_eos": True} if wishes.ignore_eos else {}
    body |= {"messages": [{"role": "user", "content": ask.prompt}]} if wishes.chat else {"prompt": ask.prompt}
    return "chat/completions" if wishes.chat else "completions", msgspec.json.encode(body)


def _take(event: bytes, now_s: float, timing: Timing) -> None:
    try:
        chunk = _chunk.decode(event)
    except msgspec.DecodeError:
        timing.problem = timing.problem or f"an event that is none: {event[:200]!r}"
        return
    if any(choice.text or (choice.delta and choice.delta.content) for choice in chunk.choices):
        timing.tokens_s.append(now_s)
    if chunk.usage is not None:
        timing.prompt_tokens, timing.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
