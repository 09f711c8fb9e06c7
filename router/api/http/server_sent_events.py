"""Server-sent events: one JSON object per event, and either a name for each, or `[DONE]` at the end."""

from collections.abc import Mapping
from typing import Any

from starlette.types import Send

from router.api.http.json_response import encode_json

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect the events otherwise
}
ENCODED_HEADERS = [(name.encode(), value.encode()) for name, value in HEADERS.items()]


class EventStream:
    """Events are collected until `flush` or `end`, because every write costs a system call and wakes the client.

    The response begins with the first write; an error before it can still become an HTTP error.
    """

    def __init__(self, send: Send, headers: Mapping[str, str], named: bool = False) -> None:
        """`named`: an event carries the name that its field `type` has, and none says that the stream is done."""
        self._send = send
        self._named = named
        self._headers = headers
        self._pending = bytearray()
        self.begun = False

    def add(self, body: Any, bookmark: str | None = "") -> None:
        """`bookmark` None: the client has the event already; empty: the event has none."""
        if bookmark is None:
            return
        if bookmark:
            self._pending += b"id: %b\n" % bookmark.encode()
        if self._named:
            self._pending += b"event: %b\n" % body.type.encode()
        self._pending += b"data: %b\n\n" % encode_json(body)

    def add_done(self) -> None:
        if not self._named:
            self._pending += b"data: [DONE]\n\n"

    async def comment(self, text: bytes) -> None:
        """Written at once: clients leave comments out, and see that the connection lives."""
        self._pending += b": %b\n\n" % text
        await self.flush()

    async def flush(self) -> None:
        """Waits when the client reads slowly."""
        if self._pending:
            await self._write(more=True)

    async def end(self) -> None:
        await self._write(more=False)

    async def _write(self, more: bool) -> None:
        if not self.begun:
            self.begun = True
            headers = ENCODED_HEADERS + [(name.encode(), value.encode()) for name, value in self._headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        data, self._pending = self._pending, bytearray()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
