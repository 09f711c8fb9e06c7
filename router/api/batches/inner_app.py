"""Requests of the router to itself: the lines of batches, with their callers' keys and the lowest priority."""

import asyncio
import contextlib
import time
from typing import Any

import msgspec
import structlog
from msgspec import Raw
from starlette.types import ASGIApp, Message

from router.api.dialects.generation import PRIORITY, REQUEST_ID_HEADER, TIMEOUT_HEADER
from router.api.dialects.plain_request import TENANT_HEADER
from router.api.http.connection import KNOWN
from router.api.http.json_response import RETRY_AFTER, encode_json
from router.api.http.key_guard import CALLER
from router.api.wishes.validation import LOWEST_PRIORITY, MAX_TIMEOUT_S
from router.batches.batch_run import Reply
from router.batches.lines import ReadLine
from router.batches.records import StoredBatch
from runtime.security.callers import ANY_TENANT, Caller

log = structlog.get_logger()


class InnerApp:
    """`app`: the HTTP application behind the keys, which is made later than this."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def ask(self, caller: Caller, stored: StoredBatch, line: ReadLine, request_id: str) -> Reply:
        assert self.app is not None
        left_s = min(MAX_TIMEOUT_S, max(1.0, stored.batch.expires_at - time.time()))
        headers = {
            "content-type": "application/json",
            REQUEST_ID_HEADER: request_id,
            TIMEOUT_HEADER: str(left_s),
            **({TENANT_HEADER: stored.tenant} if caller.tenant == ANY_TENANT and stored.tenant else {}),
        }
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": line.line.url,
            "root_path": "",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            CALLER: caller,
            KNOWN: True,
            PRIORITY: LOWEST_PRIORITY,
        }
        answer = _Answer(bytes(line.line.body))
        try:
            await self.app(scope, answer.receive, answer.send)
        except Exception as error:
            log.exception("a line of a batch failed", request_id=request_id, exc_info=error)
            return Reply(500, 0.0, encode_json({"error": {"message": f"internal error; request {request_id}"}}))
        return answer.reply()


class _Answer:
    def __init__(self, body: bytes) -> None:
        self._body = body
        self._asked = False
        self._status = 500
        self._headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []

    async def receive(self) -> Message:
        if self._asked:
            await asyncio.Event().wait()  # this client never leaves
        self._asked = True
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], dict(message["headers"])
        else:
            self._parts.append(message.get("body", b""))

    def reply(self) -> Reply:
        pause_s = 1.0
        with contextlib.suppress(ValueError):
            pause_s = float(self._headers.get(RETRY_AFTER.encode(), b"1"))
        return Reply(self._status, pause_s, _in_one_line(b"".join(self._parts)))


def _in_one_line(body: bytes) -> bytes:
    """As JSON without line breaks, which a text is made where it is none."""
    with contextlib.suppress(msgspec.DecodeError):
        return encode_json(msgspec.json.decode(body, type=Any if b"\n" in body else Raw))
    return encode_json(body.decode("utf-8", "replace"))
