"""Reads the messages of calls, a bounded number at once, so that all of them together fit into a budget.

gRPC takes LOOKAHEAD_BYTES (grpc_bearer.py) of a message that nobody reads yet, and all of it from then on.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc.aio

from router.requests.body_budget import shown_limit
from runtime.errors import OverloadedError, UnavailableError
from runtime.fair_queue import FairQueue, one_less
from runtime.turn import Turn

PATIENCE_S: Final = 1.0  # for a message, while every place is taken
MAX_WAITING: Final = 4096  # calls that wait for a place


class Receiving:
    """Invariant: the messages that are being read, and those of open `message` blocks, have no more than `limit_bytes`
    together, or are one. Tenants take turns when calls wait, as do connections of callers without a key."""

    def __init__(self, limit_bytes: int, max_message_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._free = max(1, limit_bytes // max_message_bytes)
        self._waiting: FairQueue[Turn] = FairQueue()
        self._held: Counter[str] = Counter()  # places of all blocks, by tenant, without zeros
        self._reading: dict[asyncio.Timeout, float] = {}  # since when, on the loop's clock

    @asynccontextmanager
    async def message(self, context: Any, tenant: str = "") -> AsyncIterator[bytes | None]:
        """The next message of a call; None: the client sends no more. Its place is held until the block ends. Raises
        OverloadedError and UnavailableError."""
        whose = tenant or context.peer()
        self._held[whose] += 1
        try:
            if self._free:
                self._free -= 1
            else:
                await self._wait(Turn(whose))
            try:
                yield await self._read(context)
            finally:
                self._give()
        finally:
            one_less(self._held, whose)

    async def _wait(self, place: Turn) -> None:
        """Returns when the place is given."""
        if len(self._waiting) >= MAX_WAITING:
            self._make_room(place.tenant)
        for clock, since_s in self._reading.items():
            if clock.when() is None:
                clock.reschedule(since_s + PATIENCE_S)
        self._waiting.push(place)
        try:
            await place.come
        except asyncio.CancelledError:
            if place.come.done() and not place.come.cancelled() and place.come.exception() is None:
                self._give()
            raise
        finally:
            if place in self._waiting:
                self._waiting.remove(place)

    def _make_room(self, tenant: str) -> None:
        """Raises OverloadedError."""
        error = OverloadedError("queue of unread messages", MAX_WAITING, PATIENCE_S)
        victim = next(self._waiting.dispensable(0, tenant, self._held), None)
        if victim is None:
            raise error
        self._waiting.remove(victim)
        if not victim.come.done():
            victim.come.set_exception(error)

    def _give(self) -> None:
        """Gives a place to the next who still waits."""
        for place in self._waiting.order():
            self._waiting.take(place)
            if not place.come.done():
                place.come.set_result(None)
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
            limit = shown_limit(self._limit_bytes)
            problem = f"the messages of other requests fill {limit}, and this one did not come within {PATIENCE_S} s"
            raise UnavailableError(f"{problem}; try again later") from error
        return None if data is grpc.aio.EOF else data
