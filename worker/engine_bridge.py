"""The one way between a worker's event loop and its engine thread.

Invariant: what the engine thread hands over arrives on the event loop in the order in which it happened on the engine
thread. The output of a step, the result of a posted function and the events between them never overtake each other.
Snapshots and cancels rely on this order.
"""

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any, TypeVar

import structlog

from baton_proto.discovery import WorkerLoad
from engine.interface import Engine
from engine.sequences.output import StepOutput
from worker.engines.base import MakeLoop
from worker.gathered_steps import GatheredSteps

T = TypeVar("T")

log = structlog.get_logger()


class EngineBridge:
    """The engine thread is whatever `make_loop` runs the engine on. `on_step` runs on the event loop after each step,
    or after several quick ones within `gather_s`, with the load at that moment; `on_step_here` runs on the engine
    thread after each step."""

    def __init__(
        self,
        engine: Engine,
        make_loop: MakeLoop,
        on_step: Callable[[StepOutput, WorkerLoad], None],
        on_step_here: Callable[[StepOutput], None] = lambda _: None,
        gather_s: float = 0.0,
    ) -> None:
        self._on_step_here = on_step_here
        self._steps = GatheredSteps(gather_s)
        self._engine = engine
        self._on_step = on_step
        self._loop = asyncio.get_running_loop()
        self._thread = make_loop(self._step_done)
        self._fault: asyncio.Future[Exception] = self._loop.create_future()

    def start(self) -> None:
        self._thread.start()

    async def ended(self) -> None:
        """Returns when the engine thread has ended. Raises the error of a fault in the bookkeeping: the engine's own,
        or that of posted work, after which nobody knows which requests are still on their way."""
        ended = self._follow(self._thread.ended)
        either: set[asyncio.Future[Any]] = {ended, self._fault}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            ended.result()
        else:
            raise self._fault.result()

    async def stop(self, timeout_s: float) -> None:
        await asyncio.to_thread(self._thread.stop, timeout_s)

    def post(self, work: Callable[[Engine], T], then: Callable[[T], None] | None = None) -> None:
        """Any thread: runs `work` on the engine thread between steps, then `then` with its result on the event loop.
        What `work` raises ends the worker."""

        def run(engine: Engine) -> None:
            try:
                result = work(engine)
            except Exception as error:
                self._failed(error)
                raise
            if then is not None:
                self.from_engine(then, result)

        self._thread.call(run)

    async def call(self, work: Callable[[Engine], T]) -> T:
        """Runs `work` on the engine thread. Its result arrives in order with step outputs. Raises UnavailableError when
        the engine has ended."""

        def run(engine: Engine) -> T:
            self._leave(self._steps.take())
            return work(engine)

        return await self._follow(self._thread.call(run))

    def from_engine(self, function: Callable[..., object], *arguments: Any) -> None:
        """Engine thread: calls `function` on the event loop, in order with step outputs and results; at once if the
        engine runs on the event loop."""
        self._leave(self._steps.take())
        self._pass(function, *arguments)

    def _pass(self, function: Callable[..., object], *arguments: Any) -> None:
        if self._thread.on_event_loop:
            function(*arguments)
        else:
            self.to_event_loop(function, *arguments)

    def to_event_loop(self, function: Callable[..., object], *arguments: Any) -> None:
        """Any thread. The call is dropped once the event loop has ended, because the process is leaving."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _follow(self, theirs: "concurrent.futures.Future[T]") -> "asyncio.Future[T]":
        """Unlike asyncio.wrap_future, a cancelled waiter leaves the engine's future alone."""
        ours: asyncio.Future[T] = self._loop.create_future()
        theirs.add_done_callback(lambda done: self._pass(_settle, ours, done))
        return ours

    def _step_done(self, output: StepOutput) -> None:
        try:
            self._on_step_here(output)
        except Exception as error:
            self._failed(error)
        self._leave(output if self._thread.on_event_loop else self._steps.add(output))

    def _leave(self, output: StepOutput | None) -> None:
        if output is not None:
            self._pass(self._on_step, output, self._engine.load())

    def _failed(self, error: Exception) -> None:
        log.error("work on the engine thread failed", exc_info=error)
        self.from_engine(self._keep_first_fault, error)

    def _keep_first_fault(self, error: Exception) -> None:
        if not self._fault.done():
            self._fault.set_result(error)


def _settle(ours: "asyncio.Future[T]", theirs: "concurrent.futures.Future[T]") -> None:
    if ours.done():  # whoever awaited it was cancelled
        return
    if error := theirs.exception():
        ours.set_exception(error)
    else:
        ours.set_result(theirs.result())
