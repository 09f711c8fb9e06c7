"""The HTTP server itself: how it takes connections. What it answers is tested with the API."""

import asyncio
import contextlib
import socket
from typing import Any

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from router import http_server
from router.http_server import HttpServer, serve_http

CROWD = 100
TURNS = 10


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


async def get(server: HttpServer) -> bytes:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: baton\r\nConnection: close\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_a_crowd_that_comes_at_once_is_taken_in_within_a_few_turns_of_the_event_loop(run: Any) -> None:
    async def crowd() -> int:
        async with await serve_http(hello, "127.0.0.1", 0) as server:
            await asyncio.sleep(0)
            with contextlib.ExitStack() as open_ones:
                for _ in range(CROWD):
                    open_ones.enter_context(socket.create_connection((server.host, server.port)))
                for _ in range(TURNS):
                    await asyncio.sleep(0)
                return len(server._server.server_state.connections)

    assert run(crowd()) == CROWD


async def test_a_process_without_file_descriptors_takes_connections_again_when_it_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "RETRY_ACCEPT_S", 0.02)
    real, failures = socket.socket.accept, iter([OSError(24, "Too many open files")] * 2)

    def accept(listener: socket.socket) -> Any:
        if error := next(failures, None):
            raise error
        return real(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    async with await serve_http(hello, "127.0.0.1", 0) as server:
        assert (await get(server)).endswith(b"hello")
    assert next(failures, None) is None


async def test_a_closed_server_refuses_connections() -> None:
    async with await serve_http(hello, "127.0.0.1", 0) as server:
        assert (await get(server)).startswith(b"HTTP/1.1 200")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(server.host, server.port)
