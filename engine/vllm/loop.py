"""vLLM's loop: tasks of the worker's event loop, one for vLLM's steps and one for its KV events."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import structlog

from engine.core.call_queue import EventLoopCalls
from engine.interface import Engine
from engine.sequences.output import StepOutput
from engine.vllm.engine import VllmEngine
from engine.vllm.events.stream import VllmStream
from engine.vllm.kv.engine import SharingEngine
from runtime.end_task import end_tasks
from runtime.errors import BatonError, UnavailableError

REPORT_S = 30.0

log = structlog.get_logger()
T = TypeVar("T")


class VllmLoop:
    """Implements `engine.interface.Loop`.

    Created on the event loop that it runs on. `events`: what the engine says of its cache, not yet open; None: it says
    nothing."""

    on_event_loop = True

    def __init__(self, engine: VllmEngine, events: VllmStream | None, on_step: Callable[[StepOutput], None]) -> None:
        self.ended: Future[None] = Future()
        self._engine = engine
        self._events = events
        self._on_step = on_step
        self._calls = EventLoopCalls(self._wake)
        self._loop = asyncio.get_running_loop()
        self._tasks: list[asyncio.Task[None]] = []
        self._next: asyncio.Handle | None = None
        self._closing: asyncio.Task[None] | None = None
        engine.wake = self._wake

    def start(self) -> None:
        if isinstance(self._engine, SharingEngine):
            self._loop.add_reader(self._engine.link.fileno(), self._read_kv_news, self._engine)
        work = (self._follow_steps(), self._follow_events(), self._report())
        self._tasks = [asyncio.ensure_future(one) for one in work]
        for task in self._tasks:
            task.add_done_callback(self._ended)
        self._wake()

    def stop(self, timeout_s: float = 10.0) -> None:
        self._loop.call_soon_threadsafe(self._end, None)
        self.ended.exception(timeout_s)

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        return self._calls.add(function)

    def tell(self, output: StepOutput) -> None:
        """News that are no step's."""
        if output.is_news:
            self._step(output)

    def _step(self, output: StepOutput) -> None:
        try:
            self._on_step(output)
        except Exception:
            log.exception("on_step failed")

    def _wake(self) -> None:
        if self._closing is not None:
            self._calls.refuse()
        elif self._tasks and self._next is None:
            self._next = self._loop.call_soon(self._run_calls)

    def _run_calls(self) -> None:
        self._next = None
        self._calls.run(self._engine)
        self.tell(StepOutput(self._engine.take_dead_ends(), []))
        if self._calls:  # the calls that ran just now added them
            self._wake()

    async def _follow_steps(self) -> None:
        while True:
            self.tell(await self._engine.next_step())

    async def _follow_events(self) -> None:
        if self._events is None:
            return
        await self._events.open()
        async for item in self._events.messages():
            self.tell(StepOutput([], self._engine.cache.take(item)))

    def _read_kv_news(self, engine: SharingEngine) -> None:
        try:
            output = engine.take_kv_news()
        except Exception as error:  # also of the roles' books, after which nobody knows which blocks were sent
            self._end(error)
            return
        if output is not None:
            self._step(output)  # also without outputs: a request may have its blocks

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            self._engine.cache.say_what_is_missing()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()):
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._closing is not None:
            return
        if error is not None:
            log.error("vLLM has ended", error=str(error) or type(error).__name__)
        self._closing = asyncio.ensure_future(self._close(error))

    async def _close(self, error: BaseException | None) -> None:
        self._calls.refuse()
        if isinstance(self._engine, SharingEngine):
            self._loop.remove_reader(self._engine.link.fileno())
            self._engine.link.close()
        await end_tasks(*self._tasks)
        if self._events is not None:
            await self._events.close()
        if error is None:
            self.ended.set_result(None)
        elif isinstance(error, BatonError):
            self.ended.set_exception(error)
        else:
            self.ended.set_exception(UnavailableError(f"vLLM has ended: {str(error) or type(error).__name__}"))
