"""The engine's thread: steps while there is work, runs calls between steps, and sleeps otherwise.

Because everything that touches the engine goes through `EngineLoop.call`, the engine needs no locks.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import structlog

from engine.core.call_queue import CallQueue, refused_call
from engine.core.engine import Engine
from engine.sequences.output import StepOutput
from runtime.errors import DeadlineError

log = structlog.get_logger()
T = TypeVar("T")


class EngineLoop:
    """Runs one engine. `on_step` is called on the engine thread after each step, and after calls that changed the
    prefix cache; an exception of it is logged, and the loop goes on.

    `ended` resolves when the thread has ended, with an exception if a fault in the engine's bookkeeping ended it.
    """

    on_event_loop = False

    def __init__(self, engine: Engine, on_step: Callable[[StepOutput], None]) -> None:
        self.ended: Future[None] = Future()
        self._engine = engine
        self._on_step = on_step
        self._calls = CallQueue()
        self._wakeup = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        engine.on_copied(lambda: self.call(lambda _: None))  # a step follows

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the thread after the current step. Idempotent. Raises DeadlineError when that step takes longer."""
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify()
        if self._thread.ident is None:
            self._refuse_calls()
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineError("the engine's last step", timeout_s)

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Runs `function` on the engine thread, between steps and in the order of the calls. From any thread.

        The future holds what it returned or raised, or UnavailableError when the loop ended first.
        """
        with self._wakeup:
            if self._stopping:
                return refused_call()
            self._wakeup.notify()
            return self._calls.add(function)

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            progress = False
            while self._await_work(progress):
                self._calls.run(self._engine)
                self._linger()
                progress = self._step()
        except BaseException as error:
            log.exception("engine loop failed")
            failure = error
        self._refuse_calls()
        if failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(failure)

    def _await_work(self, progress: bool) -> bool:
        """Sleeps until there is something to do; False when the loop shall end.

        After a step without progress every sequence waits for memory or the disk, and only a call can change that.
        """
        if progress and not self._stopping:
            return True
        with self._wakeup:
            self._wakeup.wait_for(lambda: len(self._calls) > 0 or self._stopping)
            return not self._stopping

    def _linger(self) -> None:
        """Puts the next step off while the last one keeps the device busy: what comes meanwhile is in it."""
        while not self._stopping and (spare_s := self._engine.spare_s()) > 0.0:
            with self._wakeup:
                self._wakeup.wait_for(lambda: len(self._calls) > 0 or self._stopping, spare_s)
            self._calls.run(self._engine)

    def _step(self) -> bool:
        """Whether the step made progress. The step of an idle engine publishes what the calls changed."""
        output = self._engine.step()
        if not output.is_news:
            return False
        try:
            self._on_step(output)
        except Exception:
            log.exception("on_step failed")
        return True  # even with no tokens: on_step may have freed memory

    def _refuse_calls(self) -> None:
        with self._wakeup:
            self._stopping = True
        self._calls.refuse()
