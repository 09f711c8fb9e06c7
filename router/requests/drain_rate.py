"""How fast requests leave the router, and from that when a caller that was refused should come back. No I/O."""

import time
from collections import deque
from collections.abc import Callable

WINDOW = 64  # departures that the rate is taken from
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 30.0


class DrainRate:
    """Counts only while the router has requests: an idle hour says nothing about how fast it works."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s = clock()  # begin of the span in which `_left_s` happened
        self._left_s: deque[float] = deque()
        self._told_to_return = 0  # callers refused, less the departures since

    def busy(self) -> None:
        """The first request is here after there was none."""
        self._since_s = self._clock()
        self._left_s.clear()
        self._told_to_return = 0

    def departed(self) -> None:
        self._left_s.append(self._clock())
        if len(self._left_s) > WINDOW:
            self._since_s = self._left_s.popleft()
        self._told_to_return = max(0, self._told_to_return - 1)

    def retry_after_s(self) -> float:
        """For one more caller that is refused now. Each one is given the next departure, so that they do not all come
        back at once."""
        self._told_to_return += 1
        per_departure_s = (self._clock() - self._since_s) / max(1, len(self._left_s))
        return min(max(self._told_to_return * per_departure_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
