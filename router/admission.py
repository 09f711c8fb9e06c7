"""The router's queue: requests wait here, not at the workers, until workers that can take them exist (late binding).

Bounded by the number of requests that are admitted and not finished. The order is priority, then arrival; a replay
keeps the place of its request. Nothing polls: whoever makes room calls `wake`. Event loop only.
"""

import asyncio
import bisect
import contextlib
import itertools
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from baton.errors import OverloadedError

# A waiter that no worker can take must not hold up all others (its prompt may need a prefill worker where theirs do
# not), but nor may each piece of news cost a placement for every waiter.
LOOK_AHEAD = 16
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 30.0


class Releasable(Protocol):
    def release(self) -> None: ...


R = TypeVar("R", bound=Releasable)


class QueueView(NamedTuple):
    waiting: int  # choices without a worker
    running: int  # choices with one
    capacity: int  # requests admitted and not finished
    oldest_age_s: float  # of those that wait


class Ticket:
    """A request's place among those admitted. Use `with`."""

    __slots__ = ("_queue", "arrived_s", "number", "priority")

    def __init__(self, queue: "AdmissionQueue", number: int, priority: int) -> None:
        self._queue = queue
        self.number = number
        self.priority = priority
        self.arrived_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.leave()


class Turn(Generic[R]):
    """One choice's wait for workers and its stay on them. Use `with`: leaving it releases what `attempt` gave."""

    __slots__ = ("_attempt", "_future", "_queue", "order", "result", "ticket")

    def __init__(self, queue: "AdmissionQueue", ticket: Ticket, attempt: Callable[[], R | None]) -> None:
        self.ticket = ticket
        self.order = (-ticket.priority, ticket.number)
        self.result: R | None = None
        self._queue = queue
        self._attempt = attempt
        self._future: asyncio.Future[R] = asyncio.get_running_loop().create_future()

    async def wait(self, timeout_s: float) -> R | None:
        """What `attempt` returned; None when the time is up, and the turn keeps its place. Raises what it raised."""
        if not self._future.done():
            await asyncio.wait((self._future,), timeout=max(0.0, timeout_s))
        return self._future.result() if self._future.done() else None

    def try_now(self) -> bool:
        """True when the turn has come, for good or ill."""
        try:
            self.result = self._attempt()
        except Exception as error:
            self._future.set_exception(error)
            return True
        if self.result is None:
            return False
        self._future.set_result(self.result)
        return True

    def __enter__(self) -> Self:
        self._queue.join(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.part(self)
        if self._future.done():
            self._future.exception()  # seen: it may have come after the waiter was cancelled
        if self.result is not None:
            self.result.release()


class AdmissionQueue:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._admitted = 0
        self._running = 0
        self._numbers = itertools.count()
        self._waiting: list[Turn[Any]] = []  # in order
        self._wake_pending = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._left_s = time.monotonic()
        self._between_leaves_s = MIN_RETRY_AFTER_S  # moving average

    def admit(self, priority: int = 0) -> Ticket:
        """Raises OverloadedError."""
        if self._admitted >= self._limit:
            retry_after_s = min(max(self._between_leaves_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
            raise OverloadedError("router's queue", self._limit, retry_after_s)
        self._admitted += 1
        self._empty.clear()
        return Ticket(self, next(self._numbers), priority)

    def turn(self, ticket: Ticket, attempt: Callable[[], R | None]) -> Turn[R]:
        """`attempt` chooses workers and charges them, or returns None; it is called again when there is news."""
        return Turn(self, ticket, attempt)

    def wake(self) -> None:
        """There may be room: a worker came, a request ended or has its first token."""
        if self._waiting and not self._wake_pending:
            self._wake_pending = True
            asyncio.get_running_loop().call_soon(self._serve)

    def view(self) -> QueueView:
        oldest_s = min((turn.ticket.arrived_s for turn in self._waiting), default=None)
        age_s = 0.0 if oldest_s is None else time.monotonic() - oldest_s
        return QueueView(len(self._waiting), self._running, self._limit, age_s)

    async def wait_empty(self, timeout_s: float) -> int:
        """Returns how many requests are left: 0 as soon as the last one is gone, more when the time is up."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        return self._admitted

    # --- for tickets and turns ----------------------------------------------------------------------------------------

    def join(self, turn: Turn[R]) -> None:
        """At once when nobody is before it, else in order."""
        if not self._waiting and turn.try_now():
            self._running += 1
            return
        bisect.insort(self._waiting, turn, key=lambda waiting: waiting.order)
        self.wake()

    def part(self, turn: Turn[R]) -> None:
        if turn in self._waiting:
            self._waiting.remove(turn)
            self.wake()
        else:
            self._running -= 1

    def leave(self) -> None:
        self._admitted -= 1
        if not self._admitted:
            self._empty.set()
        now = time.monotonic()
        self._between_leaves_s += 0.1 * (now - self._left_s - self._between_leaves_s)
        self._left_s = now

    def _serve(self) -> None:
        self._wake_pending = False
        passed_over = 0
        for turn in list(self._waiting):
            if turn.try_now():
                self._waiting.remove(turn)
                self._running += 1
            elif (passed_over := passed_over + 1) == LOOK_AHEAD:
                return
