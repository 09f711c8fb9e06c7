"""Spreads the beginnings of a call's many prompts and choices over turns of the event loop, so that others run between
them. Tenants take turns. Event loop only."""

import asyncio
from itertools import islice
from typing import Final

from runtime.fair_queue import FairQueue
from runtime.side_lane import TENANT
from runtime.turn import Turn

AT_A_TIME: Final = 8  # a choice begins in 0.1 to 0.3 ms


class Spread:
    """Invariant: while anybody waits, a turn is planned."""

    def __init__(self) -> None:
        self._waiting: FairQueue[Turn] = FairQueue()

    async def turn(self) -> None:
        place = Turn(TENANT.get())
        if not len(self._waiting):
            asyncio.get_running_loop().call_soon(self._next)
        self._waiting.push(place)
        try:
            await place.come
        finally:
            if place in self._waiting:
                self._waiting.remove(place)

    def _next(self) -> None:
        for place in list(islice(self._waiting.order(), AT_A_TIME)):
            self._waiting.take(place)
            if not place.come.done():
                place.come.set_result(None)
        if len(self._waiting):
            asyncio.get_running_loop().call_soon(self._next)
