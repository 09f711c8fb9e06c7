"""A load client that needs little CPU beside the router: HTTP/1.1 over keep-alive connections, read as bytes.

Each connection has one request in flight and sends the next when the last byte of the answer has arrived.
"""

import asyncio
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

END_OF_BODY = b"0\r\n\r\n"
QUICK_ACK = 12  # TCP_QUICKACK; a server without TCP_NODELAY would wait 40 ms for our acknowledgements


class LoadFailedError(Exception):
    """The server's answer is not a complete stream."""


@dataclass(slots=True)
class Measured:
    ttft_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    events: int = 0  # server-sent events of all answers
    duration_s: float = 0.0


class Load:
    """Runs `concurrency` connections against HOST:PORT until `seconds` are over."""

    def __init__(self, address: str, path: str, bodies: Iterator[bytes]) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n".encode()
        self._bodies = bodies

    async def run(self, concurrency: int, seconds: float) -> Measured:
        """Runs the load. Raises LoadFailedError."""
        loop = asyncio.get_running_loop()
        measured = Measured()
        connections = [
            (await loop.create_connection(lambda: _Connection(self, measured), self._host, self._port))[1]
            for _ in range(concurrency)
        ]
        began_s = time.perf_counter()
        try:
            for connection in connections:
                connection.begin(began_s + seconds)
            await asyncio.gather(*(connection.done for connection in connections))
        finally:
            for connection in connections:
                connection.close()
        measured.duration_s = time.perf_counter() - began_s
        return measured

    def next_request(self) -> bytes:
        body = next(self._bodies)
        return b"%bContent-Length: %d\r\n\r\n%b" % (self._head, len(body), body)


class _Connection(asyncio.Protocol):
    def __init__(self, load: Load, measured: Measured) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._load = load
        self._measured = measured
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._sent_s = 0.0
        self._first_s = 0.0
        self._until_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from it
        self._socket: socket.socket = transport.get_extra_info("socket")
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def begin(self, until_s: float) -> None:
        self._until_s = until_s
        self._send()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _send(self) -> None:
        assert self._transport is not None
        self._received.clear()
        self._first_s = 0.0
        self._sent_s = time.perf_counter()
        self._transport.write(self._load.next_request())

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        self._socket.setsockopt(socket.IPPROTO_TCP, QUICK_ACK, 1)
        self._received += data
        if not self._first_s and b"data:" in self._received:
            self._first_s = now_s
        if self._received.endswith(END_OF_BODY):
            self._answered(now_s)

    def _answered(self, now_s: float) -> None:
        if not self._received.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in self._received:
            self.connection_lost(LoadFailedError(f"an answer that is none: {bytes(self._received[:2000])!r}"))
            return
        self._measured.ttft_s.append(self._first_s - self._sent_s)
        self._measured.total_s.append(now_s - self._sent_s)
        self._measured.events += self._received.count(b"data: ")
        if now_s < self._until_s:
            self._send()
        elif not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or LoadFailedError(f"connection closed: {bytes(self._received[:2000])!r}"))
