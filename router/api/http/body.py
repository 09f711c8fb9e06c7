"""Reads the bodies of requests, within a limit for each and a budget for all that are in memory at once."""

from starlette.requests import Request

from router.requests.body_budget import Hold
from runtime.errors import BodyTooLargeError, InvalidRequestError, shown

PLAIN = "identity"


async def received_body(http: Request, limit_bytes: int, hold: Hold) -> bytes:
    """Reads at most `limit_bytes`, whatever the client announces or sends. Raises InvalidRequestError,
    BodyTooLargeError, UnavailableError, ClientDisconnect."""
    if (coding := http.headers.get("content-encoding", PLAIN).lower()) != PLAIN:
        raise InvalidRequestError("content-encoding", f"is {shown(coding)}; send the body as it is, not compressed")
    announced = http.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit_bytes:
        raise BodyTooLargeError(limit_bytes)
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise BodyTooLargeError(limit_bytes)
        hold.grow(len(chunk))
    return bytes(body)
