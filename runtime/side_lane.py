"""Threads for work on a request that would hold up the event loop: parsing, rendering and tokenizing what is long,
compiling grammars.

Few pieces of work run at once and a bounded number waits, because all of them share Python's lock with the loop.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, ParamSpec, TypeVar, cast

from runtime.errors import DeadlineError, OverloadedError, UnavailableError

P = ParamSpec("P")
T = TypeVar("T")

MAX_WAITING = 64
RETRY_AFTER_S = 1.0
TIMEOUT_S = 60.0  # for a piece of work whose request names no deadline
THREADS = max(2, min(8, (os.cpu_count() or 1) // 2))


class _Job(Generic[T]):
    """The pool keeps a job for which it could not start a thread, and gives it to the next one: it is nothing then."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.work: Callable[[], T] | None = work

    def __call__(self) -> T | None:
        return None if self.work is None else self.work()


class SideLane:
    def __init__(self, threads: int = THREADS, max_waiting: int = MAX_WAITING, work: str = "long prompts") -> None:
        """`work`: what errors and threads call it."""
        self._pool = ThreadPoolExecutor(threads, work)
        self._work = work
        self._limit = threads + max_waiting
        self._places = threading.Semaphore(self._limit)

    async def run(self, deadline_s: float | None, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`deadline_s`: on time.monotonic(). What has begun by then goes on and keeps its place. Raises what `work`
        raises, OverloadedError when the lane is full, UnavailableError when no thread can be started, and
        DeadlineError."""
        if not self._places.acquire(blocking=False):
            raise OverloadedError(f"queue of {self._work}", self._limit, RETRY_AFTER_S)
        job = _Job(partial(work, *args, **kwargs))
        try:
            future = self._pool.submit(job)
        except RuntimeError as error:
            job.work = None
            self._places.release()
            raise UnavailableError(f"no thread for {self._work}: {error}") from error
        future.add_done_callback(lambda _: self._places.release())
        timeout_s = TIMEOUT_S if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        try:
            async with asyncio.timeout(timeout_s):
                return cast("T", await asyncio.wrap_future(future))
        except TimeoutError as error:
            raise DeadlineError(f"reading {self._work}", timeout_s) from error
