"""When the tokens of many requests go on to their clients: together, and the more requests the more seldom.

A piece of an answer costs a router the same however many tokens it holds, 30 to 90 us. A router with hundreds of
answers that wakes for each of their steps has no time left for the requests that begin and end; these wait for no turn.
Event loop only.
"""

import asyncio
from collections import deque
from typing import Protocol

PER_REQUEST_S = 100e-6
SHORTEST_S = 0.010  # what is gathered for less goes on at once
LONGEST_S = 0.100
AT_A_TIME = 32  # are woken before the event loop looks after others


class Waking(Protocol):
    """What waits for a turn."""

    def wake(self) -> None: ...


class Pace:
    """Shared by all links of a router."""

    def __init__(self) -> None:
        self.num_requests = 0  # that have begun to answer
        self._held: list[Waking] = []
        self._next_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._num_woken = 0  # in this turn of the event loop
        self._hurried: deque[Waking] = deque()  # they wait for the next turns

    def takes(self) -> bool:
        """Whether tokens that have arrived now go on at once, all of the same message alike."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_s:
            return False
        self._plan(now_s)
        return True

    def hold(self, waking: Waking) -> None:
        """Wakes it when its turn comes. Only after `takes` was False."""
        self._held.append(waking)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(self._next_s, self._turn)

    def _turn(self) -> None:
        self._timer = None
        self._plan(asyncio.get_running_loop().time())
        held, self._held = self._held, []
        for waking in held:
            self.hurry(waking)

    def hurry(self, waking: Waking) -> None:
        """Wakes it now; after AT_A_TIME others, when the event loop has looked after others."""
        if self._num_woken < AT_A_TIME:
            if not self._num_woken:
                asyncio.get_running_loop().call_soon(self._next)
            self._num_woken += 1
            waking.wake()
        else:
            self._hurried.append(waking)

    def _next(self) -> None:
        self._num_woken = 0
        for _ in range(min(AT_A_TIME, len(self._hurried))):
            self.hurry(self._hurried.popleft())

    def _plan(self, now_s: float) -> None:
        interval_s = min(self.num_requests * PER_REQUEST_S, LONGEST_S)
        self._next_s = now_s + interval_s if interval_s > SHORTEST_S else 0.0
