"""What one HTTP client may send, how slowly, and how far ahead, on real sockets."""

import asyncio
import contextlib
import logging
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvloop
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from router.api.http import connection, watched_transport
from router.api.http.disconnect import until_disconnect
from router.api.http.server import HttpServer, serve_http

GET = b"GET / HTTP/1.1\r\nhost: baton\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: baton\r\ntransfer-encoding: chunked\r\n\r\n"
LOOPS = pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])


class Echo:
    """Answers each request with its body, in pieces, when it may."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.disconnected = asyncio.Event()
        self.scopes: list[Scope] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnected.set()
                return
            body += message["body"]
            if not message["more_body"]:
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"<" + body, "more_body": True})
        await self.may_end.wait()
        await send({"type": "http.response.body", "body": b">"})


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
async def server(echo: Echo) -> AsyncIterator[HttpServer]:
    async with await serve_http(echo, "127.0.0.1", 0) as server:
        yield server


@contextlib.asynccontextmanager
async def client(server: HttpServer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server ends the connection."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while piece := await asyncio.wait_for(reader.read(65536), 60):
            said += piece
    return said


async def write_until_closed(writer: asyncio.StreamWriter, piece: bytes, times: int) -> int:
    """How many of the pieces went out."""
    for number in range(times):
        try:
            writer.write(piece)
            await asyncio.wait_for(writer.drain(), 60)
        except (ConnectionError, TimeoutError):
            return number
    return times


@pytest.mark.parametrize(
    "begun",
    [
        CHUNKED + b"1\r\nx\r\n0\r\nx-a: ",
        CHUNKED + b"1;",
        b"\r\n",
        GET + b"\r\n",
        b"GET /",
        b"GET / HTTP/1.1\r\nx: ",
    ],
    ids=["trailer", "chunk extension", "empty lines", "empty lines after a request", "path", "header"],
)
async def test_what_is_no_body_is_bounded_wherever_it_stands(server: HttpServer, begun: bytes) -> None:
    piece = b"\r\n" * 50_000 if begun.endswith(b"\r\n") else b"b" * 100_000
    async with client(server) as (_, writer):
        writer.write(begun)
        assert await write_until_closed(writer, piece, 400) < 400
        await asyncio.wait_for(_until(lambda: not server._server.server_state.connections), 60)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def test_trailers_are_no_headers(server: HttpServer, echo: Echo) -> None:
    async with client(server) as (reader, writer):
        writer.write(CHUNKED + b"1\r\nx\r\n0\r\nauthorization: Bearer k\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 60)
    assert [name for name, _ in echo.scopes[0]["headers"]] == [b"host", b"transfer-encoding"]


async def test_a_body_in_small_chunks_is_taken_and_one_that_is_mostly_framing_is_not(server: HttpServer) -> None:
    closing = CHUNKED.replace(b"host", b"connection: close\r\nhost")
    async with client(server) as (reader, writer):
        writer.write(closing + b"10\r\n%b\r\n" % (b"x" * 16) * 20_000 + b"0\r\n\r\n")
        assert (await rest(reader)).count(b"x") == 320_000
    async with client(server) as (reader, writer):
        writer.write(closing + b"1\r\nx\r\n" * 30_000)
        answer = await rest(reader)
        assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert b"headers: headers, trailers and chunk sizes are larger than 65536 bytes" in answer


async def test_a_body_that_drips_is_refused_in_words(
    server: HttpServer, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BODY_GRACE_S", 0.1)
    async with client(server) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: baton\r\ncontent-length: 9\r\n\r\n")
        answer = await rest(reader)
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"body: comes more slowly than 16384 bytes/s after 0 s" in answer
    assert echo.disconnected.is_set()


async def test_each_byte_of_a_body_earns_time_for_the_next(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_GRACE_S", 0.2)
    monkeypatch.setattr(connection, "MIN_BODY_BYTES_PER_S", 0.1)
    async with client(server) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: baton\r\ncontent-length: 2\r\n\r\na")
        await asyncio.sleep(0.5)
        writer.write(b"b")
        assert b"<ab" in await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 60)


@pytest.mark.parametrize("begun", [b"GET / HT", CHUNKED, CHUNKED + b"1\r\n"])
async def test_who_begins_the_next_request_gets_the_answer_before_it_in_full(
    server: HttpServer, echo: Echo, begun: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEAD_TIMEOUT_S", "BODY_GRACE_S"):
        monkeypatch.setattr(connection, name, 0.05)
    echo.may_end.clear()
    async with client(server) as (reader, writer):
        writer.write(GET + begun)
        await asyncio.wait_for(reader.readuntil(b"<"), 60)
        await asyncio.sleep(0.3)  # several times what a head or body may take
        echo.may_end.set()
        assert (await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 60)).endswith(b">\r\n0\r\n\r\n")
        assert b"200 OK" not in await rest(reader)  # and only then the client has to hurry


async def test_garbage_after_a_request_ends_the_connection_after_its_answer(server: HttpServer, echo: Echo) -> None:
    echo.may_end.clear()
    async with client(server) as (reader, writer):
        writer.write(GET + b"\x00garbage\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"<"), 60)
        writer.write(b"more")
        echo.may_end.set()
        assert (await rest(reader)).endswith(b">\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    "said", [b"\x00garbage\r\n\r\n", GET.replace(b"/ ", b"http://[::1 "), GET.replace(b"/ ", b"/\xff ")]
)
async def test_what_is_no_request_is_refused_in_words(server: HttpServer, said: bytes) -> None:
    async with client(server) as (reader, writer):
        writer.write(said)
        answer = await rest(reader)
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert answer.endswith(b'"request: is not HTTP/1.1","type":"invalid_request_error","param":"request","code":null}}')


async def test_a_path_that_is_too_long_for_the_parser_is_refused_as_such(server: HttpServer) -> None:
    async with client(server) as (reader, writer):
        writer.write(GET.replace(b"/ ", b"/%b " % (b"a" * 70_000)))
        assert (await rest(reader)).startswith(b"HTTP/1.1 431 ")


async def test_a_client_of_http_1_0_gets_an_answer_without_chunks_that_ends_with_the_connection(
    server: HttpServer,
) -> None:
    async with client(server) as (reader, writer):
        writer.write(b"POST / HTTP/1.0\r\ncontent-length: 4\r\n\r\nbody")
        head, _, body = (await rest(reader)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert body == b"<body>"


async def test_few_requests_wait_for_the_answers_to_earlier_ones(server: HttpServer, echo: Echo) -> None:
    echo.may_end.clear()
    async with client(server) as (reader, writer):
        writer.write(GET * 5000)
        await asyncio.wait_for(reader.readuntil(b"<"), 60)
        echo.may_end.set()
        await rest(reader)
    assert len(echo.scopes) == 1 + connection.MAX_PIPELINED


@pytest.mark.parametrize(
    "asked",
    [
        b"upgrade: websocket\r\nconnection: upgrade\r\n",
        b"upgrade: h2c\r\nconnection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEAAEAA\r\n",
        b"Connection: keep-alive\r\nConnection: UPGRADE\r\nUpgrade: h2c\r\nupgrade: foo\r\n",
    ],
    ids=["websocket", "Java", "twice"],
)
@pytest.mark.parametrize("cut", [0, 1], ids=["at once", "byte by byte"])
async def test_who_asks_for_an_upgrade_is_answered_as_if_not(
    server: HttpServer, echo: Echo, asked: bytes, cut: int
) -> None:
    said = b"POST /x HTTP/1.1\r\nhost: baton\r\n%bcontent-length: 4\r\n\r\nbody" % asked
    said += b"POST /y HTTP/1.1\r\nhost: baton\r\n%btransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n" % asked
    said += b"GET /z HTTP/1.1\r\nhost: baton\r\nconnection: close\r\n\r\n"
    async with client(server) as (reader, writer):
        for at in range(0, len(said), cut or len(said)):
            writer.write(said[at : at + (cut or len(said))])
            await asyncio.sleep(0)
        answers = await rest(reader)
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200"] * 3
    assert [b"body" in answers, b"ab" in answers] == [True, True]
    assert [scope["path"] for scope in echo.scopes] == ["/x", "/y", "/z"]
    assert not [name for scope in echo.scopes for name, _ in scope["headers"] if name == b"upgrade"]


@pytest.mark.parametrize(
    "lines",
    [
        [b"x: %b" % (b"a" * 66_000)],
        [b"x-%d: %b" % (number, b"a" * 100) for number in range(640)],
        [b"x: a"] * 11_000,
        [b"%b: a" % (b"x" * 66_000)],
    ],
    ids=["one line", "many lines", "short lines", "a name"],
)
@pytest.mark.parametrize("first", [b"GET / HTTP/1.1", b"POST / HTTP/1.1\r\ncontent-length: 99999"])
async def test_a_head_beyond_the_limit_is_refused_however_it_comes(
    server: HttpServer, echo: Echo, first: bytes, lines: list[bytes]
) -> None:
    async with client(server) as (reader, writer):
        writer.write(b"\r\n".join([first, b"host: baton", *lines, b"", b"a" * 99_999]))
        assert (await rest(reader)).startswith(b"HTTP/1.1 431 ")
    assert not echo.scopes


async def test_a_head_just_below_the_limit_is_taken(server: HttpServer) -> None:
    async with client(server) as (reader, writer):
        writer.write(GET.replace(b"host", b"connection: close\r\nx: %b\r\nhost" % (b"a" * 65_400)))
        assert (await rest(reader)).startswith(b"HTTP/1.1 200 ")


async def test_an_answer_does_not_name_the_software(server: HttpServer) -> None:
    async with client(server) as (reader, writer):
        writer.write(GET)
        assert b"\r\nserver:" not in (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).lower()


async def big(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": bytes(16_000_000)})


@LOOPS
@pytest.mark.parametrize("last", [b"", b"connection: close\r\n"], ids=["kept alive", "closed"])
def test_who_does_not_read_a_whole_answer_loses_the_connection(
    run: Any, last: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_transport, "READ_TIMEOUT_S", 0.1)

    async def idle_reader() -> None:
        async with await serve_http(big, "127.0.0.1", 0) as server:
            with socket.create_connection((server.host, server.port)) as peer:
                peer.send(b"GET / HTTP/1.1\r\nhost: baton\r\n%b\r\n" % last)
                connections = server._server.server_state.connections
                await asyncio.wait_for(_until(lambda: bool(connections)), 60)
                await asyncio.wait_for(_until(lambda: not connections), 60)

    run(idle_reader())


@LOOPS
def test_who_reads_slowly_keeps_the_connection(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_transport, "READ_TIMEOUT_S", 0.5)

    async def slow_reader() -> int:
        async with await serve_http(big, "127.0.0.1", 0) as server, client(server) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\nhost: baton\r\nconnection: close\r\n\r\n")
            taken = 0
            while piece := await reader.read(400_000):
                taken += len(piece)
                await asyncio.sleep(0.02)
            return taken

    assert run(slow_reader()) > 16_000_000


@LOOPS
@pytest.mark.parametrize("linger", [struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)], ids=["RST", "FIN"])
def test_clients_that_leave_in_mid_answer_are_no_errors(
    run: Any, linger: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(200):
            await send({"type": "http.response.body", "body": bytes(1000), "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    async def leave() -> list[str]:
        async with await serve_http(endless, "127.0.0.1", 0) as server:
            for number in range(200):
                with socket.create_connection((server.host, server.port)) as peer:
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    peer.send(GET)
                    for _ in range(number % 20):
                        await asyncio.sleep(0)
            await asyncio.wait_for(_until(lambda: not server._server.server_state.connections), 60)
            return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.WARNING):
        assert run(leave()) == []


class Working:
    """Works until its client leaves, as a request for text does. `begins`: its answer has begun then."""

    def __init__(self, begins: bool) -> None:
        self.begins = begins
        self.works, self.left = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if self.begins:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"some", "more_body": True})
        self.works.set()
        try:
            await until_disconnect(receive, asyncio.Event().wait())
        except ClientDisconnect:
            self.left.set()


@LOOPS
@pytest.mark.parametrize("asked", [GET, GET * 3, CHUNKED + b"1\r\nx\r\n0\r\n\r\n"], ids=["one", "three", "body"])
def test_a_client_that_closes_its_side_after_its_requests_gets_the_answers(run: Any, asked: bytes) -> None:
    async def half_closed() -> bytes:
        async with await serve_http(Echo(), "127.0.0.1", 0) as server, client(server) as (reader, writer):
            writer.write(asked)
            writer.write_eof()
            return await rest(reader)

    assert run(half_closed()).count(b">\r\n0\r\n\r\n") == asked.count(b"host")


async def test_an_empty_line_behind_a_request_keeps_its_answer_from_no_client_that_closes_its_side(
    server: HttpServer, echo: Echo
) -> None:
    echo.may_end.clear()
    async with client(server) as (reader, writer):
        writer.write(GET)
        await reader.readuntil(b"<")  # and so the empty line comes in a packet of its own
        writer.write(b"\r\n")
        writer.write_eof()
        await _until(lambda: any(connection._half_closed for connection in server._server.server_state.connections))
        echo.may_end.set()
        assert (await rest(reader)).endswith(b">\r\n0\r\n\r\n")


@LOOPS
@pytest.mark.parametrize("begins", [False, True], ids=["silent", "begun"])
@pytest.mark.parametrize("closes", [False, True], ids=["closes its side", "closes"])
def test_a_client_that_may_have_left_ends_the_work_for_it_at_once(
    run: Any, begins: bool, closes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def answered() -> bytes:
        app, said = Working(begins), b""
        async with await serve_http(app, "127.0.0.1", 0) as server, client(server) as (reader, writer):
            writer.write(GET)
            await asyncio.wait_for(app.works.wait(), 60)
            writer.close() if closes else writer.write_eof()
            await asyncio.wait_for(app.left.wait(), 60)
            if not closes:
                said = await rest(reader)
            await asyncio.wait_for(_until(lambda: not server._server.server_state.connections), 60)
        return said

    with caplog.at_level(logging.WARNING):
        said = run(answered())
    assert [record.getMessage() for record in caplog.records if "graceful" not in record.getMessage()] == []
    if closes:
        return
    if begins:
        assert said.endswith(b"4\r\nsome\r\n")
    else:
        assert said.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert b"connection: was closed by the client on its side before the answer, which was given up" in said


@pytest.mark.parametrize("begun", [b"", b"GET / HT", GET + b"GET", CHUNKED, CHUNKED + b"1\r\nx\r\n"])
async def test_a_client_that_closes_its_side_in_the_middle_of_a_request_gets_nothing(
    server: HttpServer, echo: Echo, begun: bytes
) -> None:
    echo.may_end.clear()
    async with client(server) as (reader, writer):
        writer.write(begun)
        writer.write_eof()
        assert b"200 OK" not in await rest(reader) or begun.startswith(GET)
        await asyncio.wait_for(_until(lambda: not server._server.server_state.connections), 60)
    echo.may_end.set()
