"""How fast requests leave the router, and hence when a refused caller should come back. No I/O."""

import time
from collections import deque
from collections.abc import Callable

WINDOW = 64  # departures from which the rate is computed
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 30.0


class DrainRate:
    """Counts only while the router has requests: an idle hour says nothing about how fast it works."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s = clock()  # begin of the time in which the departures of `_left_s` happened
        self._left_s: deque[float] = deque()
        self._told_to_return = 0  # callers refused, less the departures since

    def busy(self) -> None:
        """A request has come to an empty router."""
        self._since_s = self._clock()
        self._left_s.clear()
        self._told_to_return = 0

    def departed(self) -> None:
        self._left_s.append(self._clock())
        if len(self._left_s) > WINDOW:
            self._since_s = self._left_s.popleft()
        self._told_to_return = max(0, self._told_to_return - 1)

    def retry_after_s(self) -> float:
        """When a caller that is refused now may return. Each caller is given a later departure, so that they do not
        return all at once."""
        per_departure_s = (self._clock() - self._since_s) / max(1, len(self._left_s))
        after_s = max(per_departure_s, MIN_RETRY_AFTER_S) + self._told_to_return * per_departure_s
        self._told_to_return += 1
        return min(after_s, MAX_RETRY_AFTER_S)
