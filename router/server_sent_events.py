"""Server-sent events as OpenAI sends them: one JSON object per event, `[DONE]` at the end. Used by http_generation."""

from collections.abc import Mapping

from starlette.types import Send

from router.json_response import encode_json

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect the events otherwise
}


class EventStream:
    """The response begins with the first event, so that an error before it can still be an HTTP error."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self._send = send
        self._headers = HEADERS | dict(headers)
        self.begun = False

    async def send(self, body: object) -> None:
        await self._write(b"data: %b\n\n" % encode_json(body))

    async def done(self) -> None:
        await self._write(b"data: [DONE]\n\n")

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, data: bytes) -> None:
        if not self.begun:
            self.begun = True
            headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
