"""Answers to clients of HTTP/1.0."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """HTTP/1.0 knows no chunks: an answer whose length is not said ends with its connection."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        unsaid = False

        async def sent(message: Message) -> None:
            nonlocal unsaid
            if message["type"] == "http.response.start":
                unsaid = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = False if unsaid else None
            elif unsaid:
                cycle.expected_content_length = len(message.get("body", b""))  # uvicorn counts it down to 0
            await send(message)

        await app(scope, receive, sent)

    return served
