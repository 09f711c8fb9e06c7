"""Serves an ASGI application over HTTP with uvicorn, in the caller's event loop."""

import asyncio
import contextlib
import heapq
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from typing import Any, cast

import structlog
import uvicorn
from starlette.types import ASGIApp

from router.api.http.connection import HEAD_TIMEOUT_S, MAX_HEAD_BYTES, PATIENCE_S, Connection
from router.api.http.errors import ErrorAnswer, ErrorBody
from router.api.http.json_response import encode_json
from runtime.sparing import Sparing

log = structlog.get_logger()
spare = Sparing(lines=2)

BACKLOG = 2048
# Of HTTP that are open at once, and of gRPC likewise; fewer where this process may not have as many open files. Each
# can fill 128 KiB with what the budget for bodies does not count (64 KiB of head, 64 KiB of body): 512 MiB in all.
MAX_CONNECTIONS = 4096
RETRY_ACCEPT_S = 0.5
AT_ONCE = (
    128  # connections that are accepted in one turn: those that are closed for them have their files until the next
)
SPEAKS_WITHIN_S = 0.25  # a client that has just connected: no other one takes its place sooner
ROOM = 32  # a 32nd part of the connections is closed at once
SEND_BUFFER_BYTES = 128 * 1024  # that the kernel holds for a client that does not read; by itself it takes 4 MB
TURNED_AWAY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b"
)
LAST = [(b"connection", b"close")]
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that none is closed while it is being reused


class HttpServer:
    """`async with await serve_http(app, host, port) as server:` serves until the block ends."""

    def __init__(self, app: ASGIApp, listener: socket.socket, tls: ssl.SSLContext | None, max_connections: int) -> None:
        self.host, self.port = listener.getsockname()[:2]
        config = uvicorn.Config(
            app,
            http=Connection,
            loop="none",  # the router's own
            ws="none",
            lifespan="off",
            log_config=None,  # the router's own
            access_log=False,
            server_header=False,
            proxy_headers=False,  # nobody asks for the client's address
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = _Server(config, tls, max_connections)
        self._task = asyncio.create_task(self._server.serve([listener]), name="http server")

    def leave(self) -> None:
        """From now on each answer says that it is the last one of its connection, so that clients go elsewhere."""
        self._server.config.encoded_headers += LAST  # those of the seconds to come
        self._server.server_state.default_headers = [*self._server.server_state.default_headers, *LAST]

    def hand_over(self) -> None:
        """Leaves the port to the other processes that listen on it. Who has connected here is answered once more."""
        self.leave()
        for acceptor in self._server.servers:
            cast(_Acceptor, acceptor).hand_over()

    def let_go(self, idle_s: float) -> None:
        """Closes the connections of those who have had an answer and ask for nothing for `idle_s`."""
        for connection in list(self._server.server_state.connections):
            cast(Connection, connection).let_go(idle_s)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Takes no new connections; requests in flight have `grace_s` to end, then they are cancelled. Idempotent."""
        self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]  # uvicorn takes floats
        self._server.should_exit = True
        await self._task
        if self._server.server_state.tasks:  # they were cancelled just now
            await asyncio.wait(self._server.server_state.tasks)

    async def __aenter__(self) -> "HttpServer":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()


async def serve_http(
    app: ASGIApp,
    host: str,
    port: int,
    tls: ssl.SSLContext | None = None,
    max_connections: int = MAX_CONNECTIONS,
) -> HttpServer:
    """HTTPS with `tls`. Connections are accepted from its return on, `max_connections` at once. Port 0 takes a free
    port. Other processes of this user may listen on the port, too, which a later router takes over so. Raises OSError
    when the address cannot be used."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, True)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # its connections inherit it
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(BACKLOG)  # from here on connections queue up, whatever uvicorn still has to do
    except OSError:
        listener.close()
        raise
    return HttpServer(app, listener, tls, max_connections)


class _Acceptor:
    """Stands in for an asyncio.Server and accepts many waiting connections per turn of the event loop. uvloop accepts
    one per turn, and turns are long under load, so the last of many simultaneous clients would wait for all of them.
    While as many connections as are allowed are open, those of the least worth are closed for who comes; where all are
    in use, who comes gets a 503, over TLS nothing, and is left."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[Callable[[], object]], Connection],
        tls: ssl.SSLContext | None,
        max_connections: int,
    ) -> None:
        """`make_protocol` is told what to call when its connection has ended."""
        self._listener = listener
        self._tls: dict[str, Any] = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": HEAD_TIMEOUT_S}
        self._make_protocol = make_protocol
        self._max_connections = max_connections
        self._open: dict[socket.socket, Connection] = {}
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._opening: set[asyncio.Task[Any]] = set()
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._listener.fileno())

    def hand_over(self) -> None:
        """Accepts who has connected by now, and nobody after that."""
        while self._accept():
            pass
        self.close()
        self._listener.close()

    async def wait_closed(self) -> None: ...

    def _accept(self) -> bool:
        """Accepts up to AT_ONCE connections. True: there may be more."""
        for _ in range(AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return False
            except OSError as error:  # as a rule no file descriptors are left
                spare(log.error, "cannot accept connections", reason=str(error), retry_s=RETRY_ACCEPT_S)
                self._make_room(PATIENCE_S)
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(RETRY_ACCEPT_S, self._resume)
                return False
            connection.setblocking(False)
            if len(self._open) >= self._max_connections and not self._make_room(SPEAKS_WITHIN_S):
                self._turn_away(connection)
                continue
            protocol = self._make_protocol(partial(self._open.pop, connection, None))
            self._open[connection] = protocol
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._begin(connection, protocol))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        return True

    async def _begin(self, connection: socket.socket, protocol: Connection) -> None:
        if connection not in self._open:  # closed before it began
            connection.close()
            return
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection, **self._tls)
        except OSError as error:  # TLS failed, or the client has left
            log.debug("no connection came about", reason=str(error))
            connection.close()
            self._open.pop(connection, None)

    def _make_room(self, resting_s: float) -> bool:
        """Closes several at once, because it looks at all of them, but none that has come, or begun or ended a request,
        in the last `resting_s`, and none that has spoken and was not heard yet."""
        until_s = time.monotonic() - resting_s
        found = ((protocol.worth(), connection) for connection, protocol in self._open.items())
        worths = [
            (worth, connection)
            for worth, connection in found
            if worth is not None and worth[1] <= until_s and not _has_spoken(connection)
        ]
        least = min((worth[0] for worth, _ in worths), default=None)
        idle = [(worth[1], connection) for worth, connection in worths if worth[0] == least]
        count = max(1, self._max_connections // ROOM)
        closed = [connection for _, connection in heapq.nsmallest(count, idle, key=itemgetter(0))]
        for connection in closed:
            if not self._open.pop(connection).drop():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # ends the TLS handshake
        if closed:
            spare(log.warning, "idle connections are closed", open=len(self._open), closed=len(closed))
        return bool(closed)

    def _turn_away(self, connection: socket.socket) -> None:
        limit = f"all {self._max_connections} connections that this router takes are open"
        spare(log.warning, "connections are refused", reason=limit)
        with connection, contextlib.suppress(OSError):
            if not self._tls:
                problem = f"{limit}; try again later, and close those that rest"
                body = encode_json(ErrorAnswer(ErrorBody(problem, "service_unavailable_error", code="unavailable")))
                connection.send(TURNED_AWAY % (len(body), body))
                connection.recv(MAX_HEAD_BYTES)  # what is unread would make the kernel take back what we have sent

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener.fileno(), self._accept)


def _has_spoken(connection: socket.socket) -> bool:
    """Whether bytes of it wait to be read."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None, max_connections: int) -> None:
        super().__init__(config)
        self._tls = tls
        self._max_connections = max_connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        def make_protocol(ended: Callable[[], object]) -> Connection:
            return Connection(self.config, self.server_state, self.lifespan.state, ended)

        more = make_protocol, self._tls, self._max_connections
        self.servers = [_Acceptor(listener, *more) for listener in sockets or []]  # type: ignore[misc]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the router."""
        yield
