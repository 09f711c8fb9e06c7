"""The HTTP server itself: how it takes connections. What it answers is tested with the API."""

import asyncio
import contextlib
import socket
import ssl
from typing import Any

import pytest
import trustme
import uvloop
from starlette.types import Receive, Scope, Send

from router.api.http import connection, server as http
from router.api.http.server import HttpServer, serve_http

CROWD = 100
TURNS = 10


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


async def get(server: HttpServer) -> bytes:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: baton\r\nConnection: close\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 60)
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
    monkeypatch.setattr(http, "RETRY_ACCEPT_S", 0.02)
    real, failures = socket.socket.accept, iter([OSError(24, "Too many open files")] * 2)

    def accept(listener: socket.socket) -> Any:
        if error := next(failures, None):
            raise error
        return real(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    async with await serve_http(hello, "127.0.0.1", 0) as server:
        assert (await get(server)).endswith(b"hello")
    assert next(failures, None) is None


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_who_comes_while_all_connections_are_open_is_told_to_come_again(run: Any) -> None:
    async def visit() -> None:
        async with await serve_http(hello, "127.0.0.1", 0, max_connections=CROWD) as server:
            held = [await asyncio.open_connection(server.host, server.port) for _ in range(CROWD)]
            for _ in range(3):
                reader, writer = await asyncio.open_connection(server.host, server.port)
                answer = await asyncio.wait_for(reader.read(), 60)
                writer.close()
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"\r\nretry-after: 1\r\n" in answer
                assert b"all 100 connections of router.max_http_connections are open; try again later" in answer
            for reader, writer in held:
                writer.write(b"GET / HTTP/1.1\r\nHost: baton\r\nConnection: close\r\n\r\n")
                assert (await asyncio.wait_for(reader.read(), 60)).endswith(b"hello")
                writer.close()
            assert (await get(server)).endswith(b"hello"), "there is room again"

    run(visit())


async def test_a_closed_server_refuses_connections() -> None:
    async with await serve_http(hello, "127.0.0.1", 0) as server:
        assert (await get(server)).startswith(b"HTTP/1.1 200")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(server.host, server.port)


@pytest.mark.parametrize("said", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: ba"])
async def test_who_does_not_end_the_head_of_a_request_is_left(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    async with await serve_http(hello, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(said)
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()


async def test_a_connection_may_rest_between_two_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    async with await serve_http(hello, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\nHost: baton\r\n\r\n")
            assert (await asyncio.wait_for(reader.readuntil(b"hello"), 60)).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.3)
        writer.close()


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_over_tls_who_shakes_no_hands_is_left_and_the_others_are_served(
    run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http, "HEAD_TIMEOUT_S", 0.5)
    ca = trustme.CA()
    theirs, ours = (
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        ssl.create_default_context(cadata=ca.cert_pem.bytes().decode()),
    )
    ca.issue_cert("127.0.0.1").configure_cert(theirs)

    async def visit() -> bytes:
        async with await serve_http(hello, "127.0.0.1", 0, theirs, max_connections=2) as server:
            for said in (b"", b"GET / HTTP/1.1\r\nHost: baton\r\n\r\n", b"Hello"):
                reader, writer = await asyncio.open_connection(server.host, server.port)
                writer.write(said)
                with contextlib.suppress(ConnectionResetError):
                    assert b"hello" not in await asyncio.wait_for(reader.read(), 60)
                writer.close()
            reader, writer = await asyncio.open_connection(server.host, server.port, ssl=ours)
            writer.write(b"GET / HTTP/1.1\r\nHost: baton\r\nConnection: close\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), 60)
            writer.close()
            return answer

    assert run(visit()).endswith(b"hello")
    assert not [record for record in caplog.records if record.name == "asyncio"]
