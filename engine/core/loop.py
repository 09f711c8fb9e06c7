"""The engine's thread: steps while there is work, runs what others ask for between steps, sleeps otherwise.

Everything that touches the engine goes through `EngineLoop.call`, so the engine needs no locks.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import structlog

from engine.core.engine import Engine, StepOutput
from runtime.errors import DeadlineError, UnavailableError

log = structlog.get_logger()
T = TypeVar("T")


class EngineLoop:
    """Runs one engine. `on_step` is called on the engine thread after each step, and after calls that changed the
    prefix cache; when it raises, that is logged and the loop goes on.

    `ended` resolves when the thread has ended: with the exception, if a fault in the engine's own bookkeeping ended it.
    """

    on_event_loop = False

    def __init__(self, engine: Engine, on_step: Callable[[StepOutput], None]) -> None:
        self.ended: Future[None] = Future()
        self._engine = engine
        self._on_step = on_step
        self._calls: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._wakeup = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

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

    def call(self, fn: Callable[[Engine], T]) -> Future[T]:
        """Runs `fn` on the engine thread, between steps and in the order of the calls. From any thread.

        The future holds what it returned or raised, or UnavailableError when the loop ended first.
        """
        future: Future[T] = Future()
        with self._wakeup:
            if self._stopping:
                future.set_exception(UnavailableError("the engine has stopped"))
                return future
            self._calls.append((fn, future))
            self._wakeup.notify()
        return future

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            progress = False
            while self._await_work(progress):
                self._run_calls()
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
        """Sleeps until there is something to do; False when the loop is to end.

        After a step without progress every sequence, if there is any, waits for memory: only a call can change that.
        """
        if progress and not self._stopping:
            return True
        with self._wakeup:
            self._wakeup.wait_for(lambda: self._calls or self._stopping)
            return not self._stopping

    def _run_calls(self) -> None:
        """Those that are here now; what they ask for in turn comes after the next step."""
        for _ in range(len(self._calls)):
            fn, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = fn(self._engine)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _step(self) -> bool:
        """Whether anything came of it. An idle engine's step only publishes what the calls did."""
        output = self._engine.step()
        if not (output.num_tokens or output.outputs or output.events):
            return False
        try:
            self._on_step(output)
        except Exception:
            log.exception("on_step failed")
        return True  # also because on_step may have freed memory for somebody

    def _refuse_calls(self) -> None:
        with self._wakeup:
            self._stopping = True
        while self._calls:
            _, future = self._calls.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(UnavailableError("the engine has stopped"))
