"""The order in which waiting requests should go: higher priority first, then tenants by turns. Pure; no clock, no I/O.

Within a priority it is start-time fair queueing (Goyal, Vin, Cheng 1996) by prompt tokens: each tenant's next request
carries a start tag, the tokens that the tenant has had since it began to wait, and the smallest tag goes first. While
two tenants both wait, the tokens they got differ by at most one request of each. A tenant that comes later starts where
the others are by then. Once nobody waits, all tags are forgotten.
"""

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

MAX_IDLE_TENANTS = 64  # remembered besides the waiting ones


class Waiter(Protocol):
    @property
    def priority(self) -> int: ...

    @property
    def tenant(self) -> str: ...

    @property
    def tokens(self) -> int:
        """What its turn costs its tenant. 0: it has paid before, and goes before those that have not."""


W = TypeVar("W", bound=Waiter)
K = TypeVar("K", bound=Hashable)


def one_less(counts: Counter[K], key: K) -> None:
    """Of what `key` holds; who holds nothing leaves the counts."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


class _Level(Generic[W]):
    """Requests of one priority."""

    def __init__(self) -> None:
        self.again: dict[W, None] = {}  # waiters that have paid, in the order of arrival
        self.tenants: dict[str, dict[W, None]] = {}  # the others by tenant, in the order of arrival
        self._start: dict[
            str, int
        ] = {}  # tag of a tenant's next request; of an idle tenant only while it is above `_now`
        self._now = 0  # highest start tag that has gone

    def add(self, waiter: W) -> None:
        if not waiter.tokens:
            self.again[waiter] = None
            return
        if waiter.tenant not in self.tenants:
            self.tenants[waiter.tenant] = {}
            self._start[waiter.tenant] = max(self._now, self._start.get(waiter.tenant, 0))
        self.tenants[waiter.tenant][waiter] = None

    def remove(self, waiter: W) -> None:
        if not waiter.tokens:
            del self.again[waiter]
            return
        waiting = self.tenants[waiter.tenant]
        del waiting[waiter]
        if not waiting:
            del self.tenants[waiter.tenant]
            if len(self._start) > len(self.tenants) + MAX_IDLE_TENANTS:
                self._sweep()

    def charge(self, waiter: W) -> None:
        if waiter.tokens:
            start = self._start[waiter.tenant]
            self._now = max(self._now, start)
            self._start[waiter.tenant] = start + waiter.tokens

    def order(self) -> Iterator[W]:
        yield from list(self.again)
        heads = []
        for number, (tenant, waiting) in enumerate(self.tenants.items()):
            rest = iter(list(waiting))
            heads.append((self._start[tenant], number, next(rest), rest))
        heapq.heapify(heads)
        while heads:
            start, number, waiter, rest = heads[0]
            yield waiter
            following = next(rest, None)
            if following is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (start + waiter.tokens, number, following, rest))

    def _sweep(self) -> None:
        """Among idle tenants, keeps those furthest ahead of their share."""
        idle = [of for of, start in self._start.items() if of not in self.tenants and start > self._now]
        kept = [*self.tenants, *heapq.nlargest(MAX_IDLE_TENANTS // 2, idle, key=self._start.__getitem__)]
        self._start = {tenant: self._start[tenant] for tenant in kept}


class FairQueue(Generic[W]):
    def __init__(self) -> None:
        self._levels: dict[int, _Level[W]] = {}  # by priority; none is empty
        self._waiting: dict[W, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, waiter: object) -> bool:
        return waiter in self._waiting

    def __iter__(self) -> Iterator[W]:
        """Yields the waiters in the order of arrival."""
        return iter(self._waiting)

    def push(self, waiter: W) -> None:
        self._waiting[waiter] = None
        self._levels.setdefault(waiter.priority, _Level()).add(waiter)

    def remove(self, waiter: W) -> None:
        """Takes out a waiter whose turn has not come."""
        del self._waiting[waiter]
        level = self._levels[waiter.priority]
        level.remove(waiter)
        if not level.again and not level.tenants:
            del self._levels[waiter.priority]

    def take(self, waiter: W) -> None:
        """The waiter's turn has come, at its tenant's cost. It need not be the first of `order`."""
        self._levels[waiter.priority].charge(waiter)
        self.remove(waiter)

    def order(self) -> Iterator[W]:
        """All waiters in the order in which they should go. Waiters may be taken or removed meanwhile."""
        for priority in sorted(self._levels, reverse=True):
            if level := self._levels.get(priority):
                yield from level.order()

    def dispensable(self, priority: int, tenant: str, held: Mapping[str, int]) -> Iterator[W]:
        """Waiters that have not paid and may make room for a newcomer, who takes the first: those of the lowest
        priority, the latest arrival first, of the tenant that holds most. `held`: places by tenant, of those who wait
        and of others. At the newcomer's own priority, a tenant must hold as many as the newcomer's afterwards."""
        lowest = min(self._levels, default=None)
        if lowest is None or lowest > priority:
            return
        waiting = self._levels[lowest].tenants
        for name in sorted(waiting, key=lambda each: -held.get(each, 0)):
            if lowest < priority or held.get(name, 0) > held.get(tenant, 0) + 1:
                yield from reversed(waiting[name])
