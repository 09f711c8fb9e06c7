"""Streamed requests to an address that speaks OpenAI's API, with the time of each event.

A request costs little CPU here, because what is measured may share this machine: answers are read as bytes.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec
from msgspec import Struct

from baton.bench.measured import Timing
from baton.bench.workload import Ask
from runtime.errors import ConfigError, UnavailableError

READ_BYTES = 1 << 16
ENDED = b"[DONE]"


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
    """`url`: http(s)://HOST:PORT, with or without /v1. Raises ConfigError."""

    def __init__(self, url: str, api_key: str | None, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("--address", f"{url!r} is no URL such as http://127.0.0.1:8000")
        self.url = url
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"Host: {parts.netloc}\r\n{key}"
        self._idle: list[_Connection] = []

    async def models(self) -> list[str]:
        """Raises UnavailableError."""
        answer = await self._exchange(f"GET {self._base}/models HTTP/1.1\r\n{self._head}\r\n".encode(), None)
        try:
            return [model.id for model in msgspec.json.decode(answer, type=ModelList).data]
        except msgspec.DecodeError as error:
            raise UnavailableError(f"{self.url} lists no models: {bytes(answer[:200])!r}") from error

    async def ask(self, ask: Ask, wishes: Wishes) -> Timing:
        """Raises nothing: the timing has the problem."""
        request = self._request(ask, wishes)
        timing = Timing(time.perf_counter())
        try:
            async with asyncio.timeout(wishes.timeout_s):
                await self._exchange(request, timing)
        except TimeoutError:
            timing.problem = f"no whole answer within {wishes.timeout_s:g} s"
        except UnavailableError as error:
            timing.problem = str(error)
        timing.ended_s = time.perf_counter()
        if not timing.problem and not timing.output_tokens:
            timing.problem = "an answer without usage or tokens"
        return timing

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    def _request(self, ask: Ask, wishes: Wishes) -> bytes:
        body: dict[str, Any] = {
            "model": wishes.model,
            "max_tokens": ask.output_tokens,
            "temperature": wishes.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {"ignore_eos": True} if wishes.ignore_eos else {}
        body |= {"messages": [{"role": "user", "content": ask.prompt}]} if wishes.chat else {"prompt": ask.prompt}
        data = msgspec.json.encode(body)
        path = f"{self._base}/{'chat/completions' if wishes.chat else 'completions'}"
        head = f"POST {path} HTTP/1.1\r\n{self._head}Content-Type: application/json\r\n"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data

    async def _exchange(self, request: bytes, timing: Timing | None) -> bytes:
        """Sends a request and reads its whole answer; returns the body. Raises UnavailableError."""
        while True:
            kept = bool(self._idle)
            connection = self._idle.pop() if kept else await self._connect()
            try:
                answer = await connection.exchange(request, timing)
            except (OSError, httptools.HttpParserError) as error:
                connection.close()
                if kept and not connection.status:
                    continue  # the server had closed it meanwhile
                raise UnavailableError(f"{self.url}: {error or type(error).__name__}") from error
            except BaseException:
                connection.close()
                raise
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()
            if connection.status != 200:
                raise UnavailableError(
                    f"{self.url} answers {connection.status}: {answer[:500].decode(errors='replace')}"
                )
            return answer

    async def _connect(self) -> "_Connection":
        name = self._host if self._tls is not None else None
        try:
            streams = await asyncio.open_connection(self._host, self._port, ssl=self._tls, server_hostname=name)
        except ssl.SSLCertVerificationError as error:
            problem = f"{self.url} shows a certificate that --ca-file does not vouch for: {error.verify_message}"
            raise UnavailableError(problem) from error
        except OSError as error:
            raise UnavailableError(f"nothing answers at {self.url}: {error.strerror or error}") from error
        return _Connection(*streams)


class _Connection:
    """A connection with one request in flight; what httptools' parser calls has its names."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.status = 0
        self.reusable = False

    def close(self) -> None:
        self._writer.transport.abort()  # a farewell in TLS would outlive our event loop

    async def exchange(self, request: bytes, timing: Timing | None) -> bytes:
        """Raises OSError, HttpParserError."""
        self._timing, self._body, self._read = timing, bytearray(), 0
        self._whole, self.status = False, 0
        self._parser = httptools.HttpResponseParser(self)
        self._writer.write(request)
        while not self._whole:
            data = await self._reader.read(READ_BYTES)
            self._now_s = time.perf_counter()
            if not data:
                raise ConnectionError("the connection was closed before the answer was whole")
            self._parser.feed_data(data)
        return bytes(self._body)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.reusable = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self._body += data.replace(b"\r\n", b"\n")
        if self._timing is None or self.status != 200:
            return
        while (end := self._body.find(b"\n\n", self._read)) >= 0:
            event, self._read = bytes(self._body[self._read : end]), end + 2
            if event.startswith(b"data: ") and (data := event[6:]) != ENDED:
                self._take(data, self._timing)

    def on_message_complete(self) -> None:
        self._whole = True

    def _take(self, data: bytes, timing: Timing) -> None:
        try:
            chunk = _chunk.decode(data)
        except msgspec.DecodeError:
            timing.problem = timing.problem or f"an event that is none: {data[:200]!r}"
            return
        if any(choice.text or (choice.delta and choice.delta.content) for choice in chunk.choices):
            timing.tokens_s.append(self._now_s)
        if chunk.usage is not None:
            timing.prompt_tokens, timing.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
