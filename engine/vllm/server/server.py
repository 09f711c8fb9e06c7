"""HTTP to one vLLM server."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import msgspec

from runtime.config.external import ExternalWorkerConfig
from runtime.errors import ProtocolError, UnavailableError
from runtime.security.secret import read_secrets
from runtime.security.tls import trusting

CONNECT_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 30.0  # a server that says nothing for as long is lost
KEPT_S: Final = 3.0  # an idle connection, less than vLLM's 5: a request on one that it closes just then would be lost
MAX_EVENT_BYTES: Final = 16 * 1024 * 1024  # the first one of an answer repeats the prompt
SHOWN_CHARS: Final = 500  # of an error's text
JSON: Final = {"Content-Type": "application/json"}


class RefusedError(Exception):
    """The server answers with a status of 400 or more. Its text is what the server says."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


class _Error(msgspec.Struct):
    message: str = ""
    code: int | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


class VllmServer:
    """Use it as a context. Event loop only."""

    def __init__(self, external: ExternalWorkerConfig) -> None:
        """Raises ConfigError when the key or the CA cannot be read."""
        self.address = external.address.rstrip("/").removesuffix("/v1")
        self._headers = {}
        if external.api_key_file is not None:
            key = read_secrets(external.api_key_file, f"{external.where}.api_key_file")[0]
            self._headers = {"Authorization": f"Bearer {key.reveal()}"}
        ca_file = external.ca_file
        self._tls = ssl.create_default_context() if ca_file is None else trusting(ca_file, f"{external.where}.ca_file")
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        # The router limits what runs here.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S, ssl=self._tls)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(
        self, path: str, question: Any = None, headers: Mapping[str, str] | None = None, *, is_patient: bool = False
    ) -> bytes:
        """The body of the answer. `question`: what is posted as JSON, if anything. `is_patient`: it may take as long as
        the server lives. Raises UnavailableError, RefusedError."""
        timeout_s = None if is_patient else ANSWER_TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s), self._request(path, question, headers) as answer:
                await _check_status(answer)
                return await answer.read()
        except TimeoutError as error:
            raise UnavailableError(f"{self.address}{path} says nothing for {ANSWER_TIMEOUT_S:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._gone(error) from error

    async def stream(self, path: str, question: bytes, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        """The data of each server-sent event. Raises UnavailableError when the connection breaks, RefusedError, and
        ProtocolError for an event that is too long."""
        rest = b""
        try:
            async with self._request(path, question, headers) as answer:
                await _check_status(answer)
                async for part in answer.content.iter_any():
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data: "):
                            yield line[len(b"data: ") :]
                    if len(rest) > MAX_EVENT_BYTES:
                        raise ProtocolError(self.address, f"an event of more than {MAX_EVENT_BYTES} bytes")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._gone(error) from error

    def _request(
        self, path: str, question: Any, headers: Mapping[str, str] | None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        assert self._session is not None, "the server is used as a context"
        if question is None:
            return self._session.get(self.address + path)
        data = question if isinstance(question, bytes) else msgspec.json.encode(question)
        return self._session.post(self.address + path, data=data, headers={**JSON, **(headers or {})})

    def _gone(self, error: Exception) -> UnavailableError:
        return UnavailableError(f"no vLLM at {self.address}: {str(error) or type(error).__name__}")


async def _check_status(answer: aiohttp.ClientResponse) -> None:
    """Raises RefusedError."""
    if answer.status >= 400:
        said = refusal(await answer.content.read(2 * SHOWN_CHARS))
        raise RefusedError(answer.status, str(said) or f"status {answer.status}")


def refusal(body: bytes) -> RefusedError:
    """What an error says, in vLLM's form or another one. Its status is 500 where it tells none."""
    try:
        error = msgspec.json.decode(body, type=_ErrorBody).error
    except msgspec.DecodeError:
        return RefusedError(500, body[:SHOWN_CHARS].decode(errors="replace"))
    return RefusedError(error.code or 500, error.message[:SHOWN_CHARS])
