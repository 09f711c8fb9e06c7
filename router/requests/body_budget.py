"""The bytes of all HTTP requests that are in memory at once, bounded together: their bodies, and what is decoded of
them until it is tokens.

Invariant: what all hold beyond FREE_BYTES each is at most the limit, and a tenant holds at most SHARE times what is
free. Therefore no tenant can take it all, and one alone can take most of it.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from runtime.config.serving import BODIES_AT_ONCE
from runtime.errors import UnavailableError

FREE_BYTES: Final = 64 * 1024  # of each body: short requests are served while long ones fill the budget
SHARE: Final = 3  # so that one tenant alone takes three quarters


def shown_limit(limit_bytes: int) -> str:
    """Of bodies or of messages, for who hears that they fill it."""
    return f"the {limit_bytes} bytes for all of them ({BODIES_AT_ONCE} times router.max_body_bytes)"


@dataclass(slots=True, eq=False)
class Hold:
    """The bytes of one request."""

    _budget: "BodyBudget"
    _tenant: str
    _num_bytes: int = 0

    def grow(self, num_bytes: int) -> None:
        """Raises UnavailableError."""
        self.become(self._num_bytes + num_bytes)

    def become(self, num_bytes: int) -> None:
        """Raises UnavailableError."""
        more = max(FREE_BYTES, num_bytes) - max(FREE_BYTES, self._num_bytes)
        if more:
            self._budget.take(self._tenant, more)
        self._num_bytes = num_bytes


class BodyBudget:
    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._taken: Counter[str] = Counter()  # bytes by tenant, without zeros

    @contextmanager
    def hold(self, tenant: str = "") -> Iterator[Hold]:
        """Leaving it gives back all."""
        hold = Hold(self, tenant)
        try:
            yield hold
        finally:
            hold.become(0)

    def take(self, tenant: str, num_bytes: int) -> None:
        """Less than 0 gives back. Raises UnavailableError."""
        mine = self._taken[tenant] + num_bytes
        free = self.limit_bytes - self._taken.total() - num_bytes
        if num_bytes > 0 and mine > SHARE * free:
            limit = shown_limit(self.limit_bytes)
            raise UnavailableError(f"the bodies of other requests fill {limit}; try again later, or with a shorter one")
        self._taken[tenant] = mine
        if not mine:
            del self._taken[tenant]
