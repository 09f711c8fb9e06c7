"""The loop of a mock engine: a timer on the event loop instead of a thread.

Interface and order are those of `EngineLoop`: calls run between steps, and a step of 10 ms delays them by 10 ms.
Hundreds of mock workers fit into one process and one thread.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import structlog

from engine.core.call_queue import EventLoopCalls
from engine.core.engine import Engine
from engine.sequences.output import StepOutput

TIMER_SLACK_S = 0.002  # event loops count in milliseconds

log = structlog.get_logger()
T = TypeVar("T")


class TimedLoop:
    """Created on the event loop that it runs on. A step is done at once; its output is published when the engine's
    clock says that the step is over."""

    on_event_loop = True

    def __init__(self, engine: Engine, on_step: Callable[[StepOutput], None]) -> None:
        self.ended: Future[None] = Future()
        self._engine = engine
        self._on_step = on_step
        self._calls = EventLoopCalls(self._wake)
        self._loop = asyncio.get_running_loop()
        self._started = False
        self._stopping = False
        self._next: asyncio.Handle | None = None  # the next turn, at once or when the step is over
        self._running: StepOutput | None = None  # the step that is not over yet
        self._over_s = 0.0  # the end of that step, by the event loop's clock
        engine.on_copied(lambda: self.call(lambda _: None))  # a step follows

    def start(self) -> None:
        self._started = True
        self._wake()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the loop, from another thread than the event loop's. Idempotent. A running step's output is dropped."""
        self._loop.call_soon_threadsafe(self._end, None)
        self.ended.exception(timeout_s)

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Runs `function` between steps, in the order of the calls. From any thread.

        The future holds what it returned or raised, or UnavailableError when the loop ended first.
        """
        return self._calls.add(function)

    def _wake(self) -> None:
        if self._stopping:
            self._calls.refuse()
        elif self._started and self._next is None:
            self._next = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._next = None
        now_s = self._loop.time()
        # A step begins when the one before was over, so that late timers do not add up.
        began_s = now_s if self._running is None else max(self._over_s, now_s - TIMER_SLACK_S)
        try:
            self._hand_on()
            self._calls.run(self._engine)
            started_s = self._engine.clock()
            output = self._engine.step()
        except BaseException as error:
            log.exception("engine loop failed")
            self._end(error)
            return
        if output.is_news:
            self._running = output
            self._over_s = began_s + self._engine.clock() - started_s
            if self._over_s <= self._loop.time():
                self._next = self._loop.call_soon(self._turn)
                self._hand_on()
            else:
                self._next = self._loop.call_at(self._over_s, self._turn)
        elif self._calls:  # the calls that ran just now added them
            self._wake()

    def _hand_on(self) -> None:
        output, self._running = self._running, None
        if output is None:
            return
        try:
            self._on_step(output)
        except Exception:
            log.exception("on_step failed")

    def _end(self, error: BaseException | None) -> None:
        if self._stopping:
            return
        self._stopping = True
        if self._next is not None:
            self._next.cancel()
        self._calls.refuse()
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
