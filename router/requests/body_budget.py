"""The bytes of all HTTP bodies that are in memory at once, bounded together, whatever each asks for."""

from collections.abc import Iterator
from contextlib import contextmanager

from runtime.errors import UnavailableError

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
        self.limit_bytes = limit_bytes
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
        if self._taken_bytes > self.limit_bytes and num_bytes:
            limit = f"the {self.limit_bytes} bytes of router.max_buffered_bytes"
            raise UnavailableError(f"the bodies of other requests fill {limit}; try again later, or with a shorter one")
