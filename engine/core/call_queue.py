"""What other threads want run with an engine, between its steps: the queue that every engine loop has."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from runtime.errors import UnavailableError

T = TypeVar("T")


class CallQueue:
    """Functions in the order of the calls. Any thread adds; the engine's thread runs or refuses."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[[Any], Any], Future[Any]]] = deque()

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, function: Callable[[Any], T]) -> Future[T]:
        """The future holds what `function` returned or raised, or UnavailableError when the loop ended first."""
        future: Future[T] = Future()
        self._calls.append((function, future))
        return future

    def run(self, engine: object) -> None:
        """Runs the functions that are here now; those that they add in turn come after the next step."""
        for _ in range(len(self._calls)):
            function, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function(engine)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def refuse(self) -> None:
        while self._calls:
            _, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(_stopped())


class EventLoopCalls(CallQueue):
    """The queue of an engine loop that runs on an event loop, the one on which the queue is created. `wake` is called
    there after each call."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__()
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def add(self, function: Callable[[Any], T]) -> Future[T]:
        if self._loop.is_closed():
            return refused_call()
        future = super().add(function)
        if threading.get_ident() == self._thread:
            self._wake()
        else:
            self._loop.call_soon_threadsafe(self._wake)
        return future


def refused_call() -> Future[Any]:
    """What a loop that has ended answers."""
    future: Future[Any] = Future()
    future.set_exception(_stopped())
    return future


def _stopped() -> UnavailableError:
    return UnavailableError("the engine has stopped")
