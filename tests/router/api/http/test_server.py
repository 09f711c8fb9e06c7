"""The HTTP server itself: how it takes connections. What it answers is tested with the API."""

import asyncio
import contextlib
import socket
import ssl
from collections import Counter
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


class Desk:
    """Knows who asks for /known, as the keys' guard does, and holds what is asked for with ?held."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/known":
            scope[connection.KNOWN] = True
        if scope["query_string"] == b"big":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": bytes(32_000_000)})
        elif scope["query_string"]:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"held", "more_body": True})
            await self.may_end.wait()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await hello(scope, receive, send)


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def said(server: HttpServer, words: bytes, until: bytes = b"") -> Stream:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(words)
    if until:
        await asyncio.wait_for(reader.readuntil(until), 60)
    return reader, writer


@pytest.fixture
def no_time_to_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SPEAKS_WITHIN_S", 0.0)


async def ended(stream: Stream) -> bool:
    """Its other end has closed it."""
    try:
        await asyncio.wait_for(stream[0].read(), 0.05)
        return True
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize(
    "idle",
    [
        b"",
        b"GET / HT",
        b"POST / HTTP/1.1\r\nHost: a\r\ncontent-length: 9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /?held HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
    ids=["silent", "half a head", "half a body", "resting", "an answer that is not read"],
)
@pytest.mark.usefixtures("no_time_to_speak")
def test_who_has_shown_nothing_makes_room_for_who_comes(run: Any, idle: bytes) -> None:
    async def visit() -> None:
        async with await serve_http(Desk(), "127.0.0.1", 0, max_connections=CROWD) as server:
            known = await said(server, b"GET /known HTTP/1.1\r\nHost: a\r\n\r\n", b"hello")
            held = [await said(server, idle) for _ in range(2 * CROWD)]
            for _ in range(3):
                assert (await get(server)).endswith(b"hello")
            assert [await ended(stream) for stream in (held[0], held[-1], known)] == [True, False, False]
            for _, writer in (*held, known):
                writer.close()

    run(visit())


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_of_a_crowd_beyond_the_places_each_is_served_or_told_to_come_again(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All connect before one of them speaks, as the clients of one program do, however long a busy machine takes."""
    monkeypatch.setattr(http, "SPEAKS_WITHIN_S", 60.0)

    async def visit() -> None:
        async with await serve_http(Desk(), "127.0.0.1", 0, max_connections=20) as server:
            crowd = [await asyncio.open_connection(server.host, server.port) for _ in range(100)]
            for _, writer in crowd:
                writer.write(b"GET /known HTTP/1.1\r\nHost: a\r\nconnection: close\r\n\r\n")
            heads = [(await asyncio.wait_for(reader.read(), 60))[9:12] for reader, _ in crowd]
            assert Counter(heads) == {b"200": 20, b"503": 80}
            for _, writer in crowd:
                writer.close()

    run(visit())


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_who_comes_while_all_connections_are_in_use_is_told_to_come_again(run: Any) -> None:
    async def visit() -> None:
        desk, limit = Desk(), 20
        async with await serve_http(desk, "127.0.0.1", 0, max_connections=limit) as server:
            asked = b"GET /known?held HTTP/1.1\r\nHost: baton\r\nConnection: close\r\n\r\n"
            held = [await said(server, asked, b"held") for _ in range(limit)]
            for _ in range(3):
                answer = await get(server)
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"\r\nretry-after: 1\r\n" in answer
                assert b"all 20 connections that this router takes are open; try again later" in answer
            desk.may_end.set()
            for reader, writer in held:
                assert (await asyncio.wait_for(reader.read(), 60)).endswith(b"0\r\n\r\n")
                writer.close()
            assert (await get(server)).endswith(b"hello"), "there is room again"

    run(visit())


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize(
    "begun",
    [
        b"POST /known?held HTTP/1.1\r\nHost: a\r\ncontent-length: 9\r\n\r\n",
        b"POST /known HTTP/1.1\r\nHost: a\r\ncontent-length: 99\r\n\r\nbody",
        b"GET /known HTTP/1.1\r\nHost: a\r\n\r\nGET /known HTTP/1.1\r\nHo",
        b"GET /known?big HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
    ids=["no body", "half a body", "half a head", "an answer that is not read"],
)
def test_who_is_known_and_keeps_the_others_waiting_makes_room_too(
    run: Any, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PATIENCE_S", 0.05)

    async def visit() -> None:
        async with await serve_http(Desk(), "127.0.0.1", 0, max_connections=4) as server:
            held = [await said(server, begun, b"HTTP/1.1" if begun.startswith(b"GET") else b"") for _ in range(4)]
            async with asyncio.timeout(60):
                while not (answer := await get(server)).endswith(b"hello"):
                    assert answer.startswith(b"HTTP/1.1 503 ")
                    await asyncio.sleep(0.01)
            for _, writer in held:
                writer.transport.abort()

    run(visit())


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
@pytest.mark.usefixtures("no_time_to_speak")
def test_who_rests_longest_is_closed_when_all_are_known(run: Any) -> None:
    async def visit() -> None:
        async with await serve_http(Desk(), "127.0.0.1", 0, max_connections=3) as server:
            known = b"GET /known HTTP/1.1\r\nHost: a\r\n\r\n"
            resting = [await said(server, known, b"hello") for _ in range(3)]
            resting[0][1].write(known)
            await asyncio.wait_for(resting[0][0].readuntil(b"hello"), 60)
            assert (await get(server)).endswith(b"hello")
            assert [await ended(stream) for stream in resting] == [False, True, False]
            for _, writer in resting:
                writer.close()

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


@pytest.mark.usefixtures("no_time_to_speak")
@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_over_tls_who_shakes_no_hands_makes_room_for_who_comes(run: Any) -> None:
    ca = trustme.CA()
    theirs, ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    ca.configure_trust(ours)
    ca.issue_cert("127.0.0.1").configure_cert(theirs)

    async def visit() -> bytes:
        async with await serve_http(Desk(), "127.0.0.1", 0, theirs, max_connections=10) as server:
            held = [await said(server, b"") for _ in range(30)]
            reader, writer = await asyncio.open_connection(server.host, server.port, ssl=ours)
            writer.write(b"GET / HTTP/1.1\r\nHost: baton\r\nConnection: close\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), 60)
            assert await ended(held[0])
            for _, one in (*held, (reader, writer)):
                one.close()
            return answer

    assert run(visit()).endswith(b"hello")
