"""Threads for work on a request that would hold up the event loop: parsing, rendering and tokenizing what is long,
compiling grammars.

Few pieces of work run at once and a bounded number waits, because all of them share Python's lock with the loop.
Tenants take turns (see fair_queue.py), and none can shut the others out: one thread is left to the others, and when all
places to wait are taken, a newcomer takes one of the tenant that holds most. What a caller no longer waits for does not
begin. Event loop only, but for `stop_if_unwanted`.
"""

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

from runtime.errors import DeadlineError, OverloadedError, UnavailableError
from runtime.fair_queue import FairQueue, one_less

P = ParamSpec("P")
T = TypeVar("T")

MAX_WAITING = 64
RETRY_AFTER_S = 1.0
TIMEOUT_S = 60.0  # for a piece of work whose request names no deadline
THREADS = 1 + max(2, min(8, (os.cpu_count() or 1) // 2))  # a tenant has one less

TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""Whose request the current task serves; each API sets it when it knows the caller. Empty: all callers without a key,
and our own work."""

_running = threading.local()


class _UnwantedError(Exception):
    """Ends work whose result nobody waits for."""


def stop_if_unwanted() -> None:
    """Ends the work of the current thread when its caller has left. Long work of several steps calls it between
    them."""
    job: _Job[Any] | None = getattr(_running, "job", None)
    if job is not None and job.done.done():
        raise _UnwantedError


class _Job(Generic[T]):
    """A piece of work, which waits for a thread or has one."""

    priority = 0
    tokens = 1  # turns are counted, because nobody knows how long a piece of work takes

    def __init__(self, tenant: str, work: Callable[[], T]) -> None:
        self.tenant = tenant
        self.done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._work: Callable[[], T] | None = work

    def run(self) -> T:
        """Runs on a thread."""
        _running.job = self
        try:
            stop_if_unwanted()
            work = self._work
            assert work is not None
            return work()
        finally:
            _running.job = None

    def end(self, error: BaseException | None, result: Callable[[], Any] = lambda: None) -> None:
        """Tells who waits, if anybody does. A job that is done never runs: the pool keeps one for which it could not
        start a thread, and gives it to the next thread."""
        self._work = None
        if self.done.done():
            return
        if error is None:
            self.done.set_result(result())
        else:
            self.done.set_exception(error)


class SideLane:
    def __init__(self, threads: int = THREADS, max_waiting: int = MAX_WAITING, work: str = "long prompts") -> None:
        """`work`: what errors and threads call it. Of several threads, one tenant has all but one at most."""
        self._pool = ThreadPoolExecutor(threads, work)
        self._work = work
        self._threads = threads
        self._max_waiting = max_waiting
        self._waiting: FairQueue[_Job[Any]] = FairQueue()
        self._running: Counter[str] = Counter()  # jobs on threads by tenant, without zeros
        self._held: Counter[str] = Counter()  # jobs on threads and waiting ones, likewise

    async def run(self, deadline_s: float | None, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `work` on behalf of TENANT. `deadline_s`: on time.monotonic(). What has begun by then goes on and keeps
        its thread. Raises what `work` raises, OverloadedError when the lane is full, UnavailableError when others
        had its threads until the deadline or no thread can be started, and DeadlineError."""
        timeout_s = TIMEOUT_S if deadline_s is None else deadline_s - time.monotonic()
        if timeout_s <= 0:
            raise DeadlineError(f"reading {self._work}", 0.0)
        job = _Job(TENANT.get(), partial(work, *args, **kwargs))
        self._enter(job)
        try:
            async with asyncio.timeout(timeout_s):
                return await job.done
        except TimeoutError as error:
            if job in self._waiting:
                busy = f"other requests kept all threads for {self._work} busy for {timeout_s:.1f} s"
                raise UnavailableError(f"{busy}; try again later") from error
            raise DeadlineError(f"reading {self._work}", timeout_s) from error
        finally:
            if job in self._waiting:
                self._leave(job)
            if job.done.done() and not job.done.cancelled():
                job.done.exception()  # retrieved, because it may have come after the caller was cancelled

    async def run_within(
        self,
        timeout_s: float,
        deadline_s: float | None,
        late: str,
        work: Callable[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """run() for work that has a time of its own. When `timeout_s` have passed before the caller's deadline, raises
        UnavailableError, which begins with `late`."""
        own_s = time.monotonic() + timeout_s
        try:
            return await self.run(min(own_s, deadline_s or own_s), work, *args, **kwargs)
        except DeadlineError:
            if deadline_s is not None and deadline_s < own_s:
                raise
            raise UnavailableError(f"{late} within {timeout_s:.0f} s; try again later") from None

    def _enter(self, job: _Job[Any]) -> None:
        """Raises OverloadedError."""
        self._waiting.push(job)
        self._held[job.tenant] += 1
        self._serve()
        if len(self._waiting) > self._max_waiting:
            self._leave(job)
            victim = next(self._waiting.dispensable(job.priority, job.tenant, self._held), None)
            if victim is None:
                raise self._overloaded()
            self._leave(victim)
            victim.end(self._overloaded())
            self._waiting.push(job)
            self._held[job.tenant] += 1

    def _leave(self, job: _Job[Any]) -> None:
        """Takes a job out before its turn."""
        self._waiting.remove(job)
        self._free(self._held, job)

    def _serve(self) -> None:
        """Gives free threads to those whose turn it is."""
        for job in self._waiting.order():
            if self._running.total() >= self._threads:
                return
            if self._running[job.tenant] < max(1, self._threads - 1):
                self._waiting.take(job)
                self._begin(job)

    def _begin(self, job: _Job[Any]) -> None:
        self._running[job.tenant] += 1
        try:
            future: Future[Any] = self._pool.submit(job.run)
        except RuntimeError as error:
            self._end(job, UnavailableError(f"no thread for {self._work}: {error}"))
            return
        ended = asyncio.wrap_future(future)
        ended.add_done_callback(lambda future: self._ended(job, future))

    def _ended(self, job: _Job[Any], future: "asyncio.Future[Any]") -> None:
        self._end(job, future.exception(), future.result)
        self._serve()

    def _end(self, job: _Job[Any], error: BaseException | None, result: Callable[[], Any] = lambda: None) -> None:
        self._free(self._running, job)
        self._free(self._held, job)
        job.end(error, result)

    def _free(self, places: Counter[str], job: _Job[Any]) -> None:
        one_less(places, job.tenant)

    def _overloaded(self) -> OverloadedError:
        return OverloadedError(f"queue of {self._work}", self._threads + self._max_waiting, RETRY_AFTER_S)
