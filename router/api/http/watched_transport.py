"""A transport that watches whether its client reads."""

import asyncio
import time
from typing import Any

READ_TIMEOUT_S = 60.0  # in which a client must take some of what waits for it


class WatchedTransport:
    """A client that takes nothing of what waits for it during READ_TIMEOUT_S loses its connection.

    uvloop collects the writes of one turn of the event loop: a response's head and its first bytes go out in one system
    call.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._written = 0  # bytes
        self._watch: asyncio.TimerHandle | None = None
        self._taken, self._taken_s = 0, 0.0  # bytes that had left at the last look while something waited, and when

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():  # else the client has left
            self._written += len(data)  # first, because write() may call pause_writing()
            self._transport.write(data)

    def close(self) -> None:
        if not self._transport.is_closing():
            self.watch_reader()
        self._transport.close()

    def watch_reader(self) -> None:
        """Begins to watch the client, until no bytes wait for it."""
        waiting = self._transport.get_write_buffer_size()
        if self._watch is None and waiting:
            self._taken, self._taken_s = self._written - waiting, time.monotonic()
            self._watch = self._loop.call_later(READ_TIMEOUT_S, self._check_reader, self._written - waiting)

    def unread_s(self) -> float:
        """Seconds in which the client has taken nothing of what waits for it, as far as anybody has looked."""
        if self._watch is None:
            return 0.0
        taken, now_s = self._written - self._transport.get_write_buffer_size(), time.monotonic()
        if taken > self._taken:
            self._taken, self._taken_s = taken, now_s
        return now_s - self._taken_s

    def lost(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def _check_reader(self, taken: int) -> None:
        self._watch = None
        if self._written - self._transport.get_write_buffer_size() > taken:
            self.watch_reader()
        else:
            self._transport.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
