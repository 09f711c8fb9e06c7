"""The router's queue: requests wait here, not at the workers, until some workers can take them (late binding).

Bounded by the number of requests that are admitted and not finished. The order is priority, then tenants by turns (see
runtime/fair_queue.py), then arrival; a replay goes before requests that have not run. When the queue is full, a
newcomer takes the place of the last request that has not run of the tenant that holds most, if that tenant holds more
than the newcomer's: one tenant cannot shut the others out. Nothing polls: whoever makes room calls `wake`. Event loop
only.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from router.requests.drain_rate import DrainRate
from runtime.errors import OverloadedError
from runtime.fair_queue import FairQueue, one_less
from runtime.within import happens

# Waiters that are passed over per wake-up. A waiter that no worker can take must not hold up the others (its prompt may
# need a prefill worker where theirs do not), and a wake-up must not cost a placement for every waiter.
LOOK_AHEAD = 16
AT_A_TIME = 16  # waiters that get workers before the event loop looks after others: each takes 0.1 ms


class Releasable(Protocol):
    def release(self) -> None: ...


R = TypeVar("R", bound=Releasable)


class QueueView(NamedTuple):
    waiting: int  # choices without a worker
    running: int  # choices with one
    capacity: int  # requests admitted and not finished
    oldest_age_s: float  # of the waiting choices


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's place among those admitted. Use `with`."""

    _queue: "AdmissionQueue"
    priority: int
    tenant: str
    deadline_s: float
    arrived_s: float = field(default_factory=time.monotonic)
    turns: "set[Turn[Any]]" = field(default_factory=set)  # of its choices that wait
    started: bool = False  # one of its choices has had workers
    refused: OverloadedError | None = None  # it had to make room for another request

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *why: object) -> None:
        if self.refused is None:
            self._queue.leave(self)


class Turn(Generic[R]):
    """One choice's wait for workers and its stay on them. Use `with`: leaving releases what `attempt` returned."""

    __slots__ = ("_attempt", "_future", "_queue", "result", "ticket", "tokens")

    def __init__(self, queue: "AdmissionQueue", ticket: Ticket, attempt: Callable[[], R | None], tokens: int) -> None:
        self.ticket = ticket
        self.tokens = tokens
        self.result: R | None = None
        self._queue = queue
        self._attempt = attempt
        self._future: asyncio.Future[R] = asyncio.get_running_loop().create_future()

    @property
    def priority(self) -> int:
        return self.ticket.priority

    @property
    def tenant(self) -> str:
        return self.ticket.tenant

    @property
    def is_decided(self) -> bool:
        """Whether wait() returns or raises at once."""
        return self._future.done()

    async def wait(self, timeout_s: float, beside: "asyncio.Task[None] | None" = None) -> R | None:
        """What `attempt` returned; None when the time is up or `beside` has ended, and the turn keeps its place. Raises
        what `attempt` raised, and OverloadedError when the request had to make room for another one."""
        if not self._future.done():
            awaited: set[asyncio.Future[Any]] = {self._future} if beside is None else {self._future, beside}
            await asyncio.wait(awaited, timeout=max(0.0, timeout_s), return_when=asyncio.FIRST_COMPLETED)
        return self._future.result() if self._future.done() else None

    def try_now(self) -> bool:
        """Calls `attempt`. Returns whether it gave a result or raised."""
        try:
            self.result = self._attempt()
        except Exception as error:
            self._future.set_exception(error)
            return True
        if self.result is None:
            return False
        self.ticket.started = True
        self._future.set_result(self.result)
        return True

    def refuse(self, error: OverloadedError) -> None:
        self._future.set_exception(error)

    def __enter__(self) -> Self:
        self._queue.join(self)
        return self

    def __exit__(self, *why: object) -> None:
        self._queue.part(self)
        if self._future.done():
            self._future.exception()  # retrieved, because it may have come after the waiter was cancelled
        if self.result is not None:
            self.result.release()


class AdmissionQueue:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._admitted: Counter[str] = Counter()  # requests by tenant, without zeros
        self._running = 0
        self._waiting: FairQueue[Turn[Any]] = FairQueue()
        self._wake_pending = False
        self._drain_rate = DrainRate()
        self._empty = asyncio.Event()
        self._empty.set()

    def admit(self, priority: int = 0, tenant: str = "", deadline_s: float = float("inf")) -> Ticket:
        """`deadline_s` (time.monotonic): a request that still waits then gets no workers. Raises OverloadedError."""
        if self._admitted.total() >= self._limit:
            self._make_room(priority, tenant)
        if not self._admitted:
            self._drain_rate.busy()
        self._admitted[tenant] += 1
        self._empty.clear()
        return Ticket(self, priority, tenant, deadline_s)

    def turn(self, ticket: Ticket, attempt: Callable[[], R | None], tokens: int = 1) -> Turn[R]:
        """`attempt` chooses workers and charges them, or returns None and is called again after a `wake`. The tenant
        pays `tokens` when the choice waited and its turn comes; 0 for a replay, which the tenant has paid for."""
        return Turn(self, ticket, attempt, tokens)

    def wake(self) -> None:
        """Tells the queue that there may be room: a worker came, a request ended or has its first token."""
        if len(self._waiting) and not self._wake_pending:
            self._wake_pending = True
            asyncio.get_running_loop().call_soon(self._serve)

    def view(self) -> QueueView:
        oldest_s = min((turn.ticket.arrived_s for turn in self._waiting), default=None)
        age_s = 0.0 if oldest_s is None else time.monotonic() - oldest_s
        return QueueView(len(self._waiting), self._running, self._limit, age_s)

    def prompts_before(self, turn: Turn[R]) -> list[int]:
        """Prompt tokens of each waiting choice that surely gets workers before this one: those of higher priority, and
        its tenant's earlier ones."""
        place = (-turn.priority, turn.ticket.arrived_s)
        return [
            other.tokens
            for other in self._waiting
            if (-other.priority, other.ticket.arrived_s) < place
            and (other.tenant == turn.tenant or other.priority > turn.priority)
        ]

    def waiting_tokens(self) -> int:
        """Prompt tokens of the waiting choices. A replay counts none."""
        return sum(turn.tokens for turn in self._waiting)

    @property
    def is_empty(self) -> bool:
        return self._empty.is_set()

    async def wait_empty(self, timeout_s: float) -> int:
        """Returns how many requests are left: 0 as soon as the last one has gone, more when the time is up."""
        await happens(self._empty, timeout_s)
        return self._admitted.total()

    # --- for tickets and turns ----------------------------------------------------------------------------------------

    def join(self, turn: Turn[R]) -> None:
        """Tries at once when nobody waits, else waits in order."""
        if turn.ticket.refused is not None:
            turn.refuse(turn.ticket.refused)
        elif not len(self._waiting) and turn.try_now():
            self._running += 1
        else:
            self._waiting.push(turn)
            turn.ticket.turns.add(turn)
            self.wake()

    def part(self, turn: Turn[R]) -> None:
        if turn in self._waiting:
            self._waiting.remove(turn)
            turn.ticket.turns.discard(turn)
            self.wake()
        elif turn.ticket.refused is None:
            self._running -= 1

    def leave(self, ticket: Ticket) -> None:
        one_less(self._admitted, ticket.tenant)
        if not self._admitted:
            self._empty.set()
        self._drain_rate.departed()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._wake_pending = False
        served = passed_over = 0
        now = time.monotonic()
        for turn in self._waiting.order():
            if turn.ticket.deadline_s <= now:
                continue  # its own timer tells it
            if turn.try_now():
                self._waiting.take(turn)
                turn.ticket.turns.discard(turn)
                self._running += 1
                if (served := served + 1) == AT_A_TIME:
                    self.wake()
                    return
            elif (passed_over := passed_over + 1) == LOOK_AHEAD:
                return

    def _make_room(self, priority: int, tenant: str) -> None:
        """Refuses somebody else for a newcomer, or raises OverloadedError."""
        error = OverloadedError("router's queue", self._limit, self._drain_rate.retry_after_s())
        victims = self._waiting.dispensable(priority, tenant, self._admitted)
        victim = next((turn.ticket for turn in victims if not turn.ticket.started), None)
        if victim is None:
            raise error
        victim.refused = error
        for turn in victim.turns:
            self._waiting.remove(turn)
            turn.refuse(error)
        victim.turns.clear()
        one_less(self._admitted, victim.tenant)
