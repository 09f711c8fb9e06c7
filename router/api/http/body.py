"""Reads the bodies of requests, within a limit for each and a budget for all that are in memory at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request

from runtime.errors import BodyTooLargeError, UnavailableError

FREE_BYTES = 64 * 1024  # of each body: short requests are served while long ones fill the budget


class Hold:
    """The bytes of one body."""

    __slots__ = ("_budget", "num_bytes")

    def __init__(self, budget: "BodyBudget") -> None:
        self._budget = budget
        self.num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Raises UnavailableError."""
        before = max(FREE_BYTES, self.num_bytes)
        self.num_bytes += num_bytes
        self._budget.take(max(0, self.num_bytes - before))


class BodyBudget:
    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._taken_bytes = 0

    @contextmanager
    def hold(self) -> Iterator[Hold]:
        """Leaving it gives back what the hold has grown by."""
        hold = Hold(self)
        try:
            yield hold
        finally:
            self._taken_bytes -= max(0, hold.num_bytes - FREE_BYTES)

    def take(self, num_bytes: int) -> None:
        self._taken_bytes += num_bytes
        if self._taken_bytes > self._limit_bytes and num_bytes:
            limit = f"the {self._limit_bytes} bytes of router.max_buffered_bytes"
            raise UnavailableError(f"the bodies of other requests fill {limit}; try again later, or with a shorter one")


async def received_body(http: Request, limit_bytes: int, hold: Hold) -> bytes:
    """Reads at most `limit_bytes`, whatever the client announces or sends. Raises BodyTooLargeError, UnavailableError,
    ClientDisconnect."""
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
