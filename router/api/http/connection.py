"""One HTTP connection: uvicorn's protocol, with bounds on what a client may send, on how slowly it may send and read,
and on how far ahead of its answers it may ask.

The client's clock runs while its head or body is awaited, and stands while an earlier request of it is being answered.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, cast

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from router.api.http.errors import ErrorAnswer, ErrorBody
from router.api.http.http_1_0 import without_chunks
from router.api.http.json_response import encode_json
from router.api.http.watched_transport import WatchedTransport

MAX_HEAD_BYTES = 64 * 1024  # of a request that are not body: its head, its trailers, what frames its chunks
HEAD_TIMEOUT_S = 10.0  # for the whole head of a request, and for TLS before the first one
BODY_GRACE_S = 20.0  # for a body of any size, and then
MIN_BODY_BYTES_PER_S = 16 * 1024
MAX_PIPELINED = 16  # requests that wait while an earlier one of the same connection is answered

# What is awaited of a client
REQUEST: Final = "request"  # none has begun, but some bytes have come: empty lines, which mean nothing before a request
HEAD: Final = "head"  # of a request, from its first byte on
BODY: Final = "body"
NOTHING: Final = ""  # the request is complete, and no byte of another one has come

KNOWN: Final = "baton.known"  # in the scope of a request that has shown a key, or needs none
DROP: Final = "baton.drop"  # in every scope: closes the connection at once
PATIENCE_S: Final = 1.0  # with a known client that is behind in sending or reading, when places run short

Worth = tuple[int, float]


class Connection(HttpToolsProtocol):
    """Trailers are read and dropped. What is refused while an answer is being sent ends the connection after it."""

    def __init__(
        self, config: Config, state: ServerState, app_state: dict[str, Any], ended: Callable[[], object]
    ) -> None:
        """`ended` is called once the connection is lost."""
        super().__init__(config, state, app_state)
        self._ended = ended
        self._since_s = time.monotonic()  # the connection has come, or its last request has begun or ended
        self._awaits: str = HEAD
        self._serving: RequestResponseCycle | None = None
        self._known = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, WatchedTransport(transport, self.loop)))
        self._deaf = False  # what comes is dropped
        self._half_closed = False  # by the client, after whole requests
        self._overhead_bytes = 0  # of this request, without what its body has paid for
        self._body_bytes = 0
        self._timed: str = NOTHING  # what the client's clock runs for
        self._clock: asyncio.TimerHandle | None = None
        self._set_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._awaits, self._deaf = NOTHING, True
        self._set_clock()
        cast(WatchedTransport, self.transport).lost()
        super().connection_lost(exc)
        self._ended()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if not self._awaits:
            self._awaits = REQUEST
        self._overhead_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse_unparsed()
        if self._overhead_bytes > MAX_HEAD_BYTES:
            self._refuse_overhead()
        self._set_clock()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns True to keep our side open for the answers to whole requests, which TLS does not allow."""
        if self.scheme == "https" or self._awaits in (HEAD, BODY) or not self._answering():
            self.transport.close()  # after what waits for this turn's end
            return False
        self._half_closed = True
        self._hang_up()
        if self._serving is not None:
            self._serving.message_event.set()  # wakes who waits for the client's end
        return True

    def _parse(self, data: bytes) -> None:
        """A request for an upgrade is read once more without the header that asks for it, because the parser takes all
        behind such a head for the other protocol's."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._upgrades():  # CONNECT
                    self._hang_up()
                    return
                data = self._plain_head() + data[upgrade.args[0] :]

    def _plain_head(self) -> bytes:
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        head = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        return b"".join([head, *lines, b"\r\n"])

    # --- when places run short ----------------------------------------------------------------------------------------

    def worth(self) -> Worth | None:
        """The connection of the least worth is closed first; None: not this one, which is being answered or sends."""
        if self.transport is None or self.transport.is_closing() or not self._is_known():
            return (0, self._since_s)
        if self._answering():
            return (3, self._since_s) if cast(WatchedTransport, self.transport).unread_s() > PATIENCE_S else None
        if self._awaits in (NOTHING, REQUEST):
            return (1, self._since_s)
        due_s = self._since_s + PATIENCE_S + self._body_bytes / MIN_BODY_BYTES_PER_S
        return (2, self._since_s) if time.monotonic() > due_s else None

    def let_go(self, idle_s: float) -> None:
        """Closes the connection where the client has had an answer, and has asked for nothing for `idle_s` since: the
        head of an answer under way has not said that it is the last."""
        rests = not self._answering() and self._awaits in (NOTHING, REQUEST)
        if self._serving is not None and rests and time.monotonic() - self._since_s > idle_s:
            self.transport.close()

    def drop(self) -> bool:
        """Closes the connection at once. False: it has no transport yet."""
        if self.transport is None:
            return False
        self.transport.abort()
        return True

    def _is_known(self) -> bool:
        """The client has shown a key at some time, or asked for something where none is needed."""
        if not self._known and self._serving is not None:
            self._known = KNOWN in self._serving.scope
        return self._known

    # --- what the parser finds ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests before their answers")  # becomes _refuse_unparsed
        self._awaits, self._since_s, self._body_bytes = HEAD, time.monotonic(), 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._check_lines(len(self.url))
        if self._upgrades():
            return  # it is read once more
        super().on_headers_complete()  # raises when the path is none
        self._awaits = BODY
        self.headers = []  # for the trailers, which nobody gets

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._overhead_bytes -= 2 * len(body)  # itself, and as much of chunk sizes
        if self._overhead_bytes < 0:
            self._overhead_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrades():
            return
        self._check_lines(0)
        self._awaits, self._overhead_bytes = NOTHING, 0
        super().on_message_complete()

    def _upgrades(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _check_lines(self, path_bytes: int) -> None:
        """Raises ValueError when this head's lines, or these trailers, are longer than MAX_HEAD_BYTES together. They
        may have come at once with all that is behind them, which `_overhead_bytes` forgets."""
        total = path_bytes + sum([len(name) + len(value) + 4 for name, value in self.headers])
        if total > MAX_HEAD_BYTES:
            self._overhead_bytes = total
            raise ValueError("a head that is too long")  # becomes _refuse_unparsed

    def _refuse_unparsed(self) -> None:
        """data_received() answers for what is too long; the parser gives up on a path of 64 KiB by itself."""
        if self._overhead_bytes <= MAX_HEAD_BYTES:
            self._refuse("400 Bad Request", "request", "is not HTTP/1.1")

    def _refuse_overhead(self) -> None:
        problem = f"headers, trailers and chunk sizes are larger than {MAX_HEAD_BYTES} bytes"
        self._refuse("431 Request Header Fields Too Large", "headers", problem)

    # --- answers ------------------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._serving = cycle
        cast(dict[str, Any], cycle.scope)[DROP] = self.drop
        served: Any = app if cycle.scope["http_version"] != "1.0" else without_chunks(app, cycle)
        served = self._until_half_closed(served, cycle)
        super()._start_asgi_task(cycle, served)

    def on_response_complete(self) -> None:
        self._is_known()
        self._since_s = time.monotonic()
        super().on_response_complete()
        if not self.transport.is_closing():
            self._set_clock()

    def pause_writing(self) -> None:
        cast(WatchedTransport, self.transport).watch_reader()
        super().pause_writing()

    def _answering(self) -> bool:
        """An answer is due, and to no request whose body is still awaited."""
        serving = self._serving
        due = serving is not None and not serving.response_complete
        return due and (self._awaits != BODY or serving is not self.cycle)

    def _until_half_closed(self, app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
        """Whoever waits for the client's end is told of it when the client has closed its side, because a client that
        has gone looks the same until it is written to. All others answer."""

        async def served(scope: Scope, receive: Receive, send: Send) -> None:
            asked_in_full = False

            async def received() -> Message:
                nonlocal asked_in_full
                if not (asked_in_full and self._half_closed):
                    message = await receive()
                    if not (asked_in_full and self._half_closed):
                        asked_in_full = not message.get("more_body", False)
                        return message
                return {"type": "http.disconnect"}

            await app(scope, received, send)
            if self._half_closed and not cycle.response_complete:
                if not cycle.response_started:
                    problem = "was closed by the client on its side before the answer, which was given up"
                    self._write_refusal("400 Bad Request", "connection", problem)
                cycle.disconnected = True  # else uvicorn complains of an answer that is missing
                self.transport.close()

        return served

    # --- the client's clock -------------------------------------------------------------------------------------------

    def _set_clock(self) -> None:
        awaited = self._awaits if self._awaits and not self._answering() else NOTHING
        if awaited == self._timed:
            return
        self._timed = awaited
        if self._clock is not None:
            self._clock.cancel()
        if awaited in (REQUEST, HEAD):
            self._clock = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)
        elif awaited == BODY:
            self._clock = self.loop.call_later(BODY_GRACE_S, self._check_body, self.loop.time())

    def _check_body(self, since_s: float) -> None:
        left_s = since_s + BODY_GRACE_S + self._body_bytes / MIN_BODY_BYTES_PER_S - self.loop.time()
        if left_s > 0:
            self._clock = self.loop.call_later(left_s, self._check_body, since_s)
        else:
            problem = f"comes more slowly than {MIN_BODY_BYTES_PER_S} bytes/s after {BODY_GRACE_S:.0f} s"
            self._refuse("408 Request Timeout", "body", problem)

    # --- refusals -----------------------------------------------------------------------------------------------------

    def _refuse(self, status: str, field: str, problem: str) -> None:
        if self._answering() or (self._awaits == BODY and self.cycle.response_started):
            self._hang_up()
        elif not self.transport.is_closing():
            self._write_refusal(status, field, problem)
            self._deaf = True
            self.transport.close()

    def _write_refusal(self, status: str, field: str, problem: str) -> None:
        body = encode_json(ErrorAnswer(ErrorBody(f"{field}: {problem}", "invalid_request_error", field)))
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    def _hang_up(self) -> None:
        """Closes after the answers to all that was asked in full."""
        self._deaf = True
        if self._awaits == BODY and self.pipeline:
            self.pipeline.popleft()  # its body will not come
        last = self.pipeline[0][0] if self.pipeline else self._serving
        if last is None or last.response_complete:
            self.transport.close()
        else:
            last.keep_alive = False
