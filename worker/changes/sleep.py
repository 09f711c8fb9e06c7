"""Sleep and wake of one worker. To sleep, it drains, lets its peers go and gives its memory back. Awake again, it takes
requests. Routers learn of both from the state in the worker's record."""

import asyncio
import time
from collections.abc import Awaitable
from inspect import isawaitable
from typing import TypeVar

import structlog

from baton_proto.worker import TAGS, SleepReport
from engine.interface import LEVELS
from runtime.errors import ModelError, UnavailableError
from worker.runtime import WorkerRuntime

T = TypeVar("T")

log = structlog.get_logger()


class Sleeper:
    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self.turn = asyncio.Lock()  # one sleep, wake or step of an update at a time
        self.held = ""  # why the worker neither falls asleep nor wakes

    async def sleep(self, level: int, timeout_s: float) -> SleepReport:
        """Level 2 after level 1 drops the weights that are kept in host memory. A worker stays awake when its requests
        do not end within `timeout_s`, or its peers do not let go within another `timeout_s`; the report says why."""
        if level not in LEVELS:
            return self._report(f"level: {level} is none of {', '.join(map(str, LEVELS))}")
        async with self.turn:
            runtime = self._runtime
            began_s = time.monotonic()
            if self.held:
                return self._report(f"stays as it is: {self.held}")
            try:
                if not runtime.asleep:
                    await self.let_go(timeout_s)
                    await self.forget(keep=level == 1)
                freed = await _done(await runtime.bridge.call(lambda _: runtime.assembly.memory.sleep(level)))
            except (UnavailableError, RuntimeError) as error:  # torch raises RuntimeError without host memory
                await self.rise()
                return self._report(f"stays awake: {error}")
            await runtime.announce()
            log.info("asleep", level=level, freed_bytes=freed, seconds=round(time.monotonic() - began_s, 3))
            return self._report("", freed, time.monotonic() - began_s)

    async def wake(self, tags: tuple[str, ...]) -> SleepReport:
        """Takes the memory of these tags again; without tags, all. Requests are taken when nothing is asleep."""
        if strange := [tag for tag in tags if tag not in TAGS]:
            return self._report(f"tags: {strange[0]!r} is none of {', '.join(TAGS)}")
        async with self.turn:
            runtime = self._runtime
            began_s = time.monotonic()
            if self.held:
                return self._report(f"stays as it is: {self.held}")
            if not runtime.asleep:
                return self._report("")
            try:
                await _done(await runtime.bridge.call(lambda _: runtime.assembly.memory.wake(tags or TAGS)))
            except (UnavailableError, ModelError, RuntimeError) as error:
                return self._report(f"sleeps on: {error}")
            await self.rise()
            if problem := runtime.assembly.memory.problem:
                return self._report(f"is not ready: {problem}")
            log.info("woken", asleep=list(runtime.asleep), seconds=round(time.monotonic() - began_s, 3))
            return self._report("", 0, time.monotonic() - began_s)

    async def let_go(self, timeout_s: float) -> None:
        """Lets go of requests and peers. Raises UnavailableError; then only rise() makes the worker serve on."""
        runtime = self._runtime
        if remaining := await runtime.drain(timeout_s):
            raise UnavailableError(f"{remaining} requests are in flight after {timeout_s:.1f} s")
        await runtime.role.peers.suspend(timeout_s)

    async def forget(self, *, keep: bool) -> None:
        """Lets go of cached prefixes; `keep`: but for those that fit into host memory. Raises UnavailableError."""
        self._runtime.publisher.publish(await self._runtime.bridge.call(lambda engine: engine.forget_cache(keep=keep)))
        await self._runtime.fresh_load()

    async def rise(self) -> None:
        """Serves again, unless memory sleeps or the weights are in pieces."""
        if not self._runtime.asleep and not self._runtime.assembly.memory.problem:
            self._runtime.role.peers.resume()
            await self._runtime.fresh_load()
            self._runtime.note_weights()
            self._runtime.draining = False
        await self._runtime.announce()

    def _report(self, problem: str, freed_bytes: int = 0, seconds: float = 0.0) -> SleepReport:
        runtime = self._runtime
        return SleepReport(runtime.state, list(runtime.asleep), freed_bytes, seconds, problem)


async def _done(result: T | Awaitable[T]) -> T:
    """Waits for what an engine in another process does."""
    return await result if isawaitable(result) else result
