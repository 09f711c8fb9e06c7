"""Reads the messages of calls, a bounded number at once, so that all of them together fit into a budget.

gRPC takes LOOKAHEAD_BYTES (grpc_bearer.py) of a message that nobody reads yet, and all of it from then on.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc.aio

from runtime.errors import OverloadedError, UnavailableError

PATIENCE_S: Final = 1.0  # for a message, while every place is taken
MAX_WAITING: Final = 4096  # calls that wait for a place


class Receiving:
    """Invariant: the messages that are being read, and those of open `message` blocks, have no more than `limit_bytes`
    together, or are one. Connections take turns when calls wait."""

    def __init__(self, limit_bytes: int, max_message_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._free = max(1, limit_bytes // max_message_bytes)
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by connection; the first one's turn is next
        self._num_waiting = 0
        self._reading: dict[asyncio.Timeout, float] = {}  # since when, on the loop's clock

    @asynccontextmanager
    async def message(self, context: Any) -> AsyncIterator[bytes | None]:
        """The next message of a call; None: the client sends no more. Its place is held until the block ends. Raises
        OverloadedError and UnavailableError."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(context.peer())
        try:
            yield await self._read(context)
        finally:
            self._leave()

    async def _wait(self, connection: str) -> None:
        """Returns with a place."""
        if self._num_waiting >= MAX_WAITING:
            raise OverloadedError("queue of unread messages", MAX_WAITING, PATIENCE_S)
        for clock, since_s in self._reading.items():
            if clock.when() is None:
                clock.reschedule(since_s + PATIENCE_S)
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(connection, deque()).append(place)
        self._num_waiting += 1
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._leave()
            raise
        finally:
            self._num_waiting -= 1

    def _leave(self) -> None:
        """Gives a place to the next who still waits."""
        while self._waiting:
            connection = next(iter(self._waiting))
            places = self._waiting.pop(connection)
            place = places.popleft()
            if places:
                self._waiting[connection] = places
            if not place.done():
                place.set_result(None)
                return
        self._free += 1

    async def _read(self, context: Any) -> bytes | None:
        now_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(None if self._free else now_s + PATIENCE_S) as clock:
                self._reading[clock] = now_s
                try:
                    data = await context.read()
                finally:
                    del self._reading[clock]
        except TimeoutError as error:
            limit = f"the {self._limit_bytes} bytes of router.max_buffered_bytes"
            problem = f"the messages of other requests fill {limit}, and this one did not come within {PATIENCE_S} s"
            raise UnavailableError(f"{problem}; try again later") from error
        return None if data is grpc.aio.EOF else data
