"""A process in a Ray actor, as its supervisor sees it."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final

from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from baton.service.on_ray.cluster import answer
from runtime.processes.process import Process, ProcessExit, ProcessFailedError, Ready

AGAIN_S: Final = 0.5  # until an actor that was not reached is asked again
HOST_TIMEOUT_S: Final = 5.0  # for an actor's answer, beyond the time that the actor itself waits


class RayProcess(Process):
    """`place` starts the process and returns its actor (a ProcessHost) and its pid."""

    def __init__(self, name: str, place: Callable[[], Coroutine[Any, Any, tuple[Any, int]]]) -> None:
        self.name = name
        self._place = place
        self._placing: asyncio.Task[tuple[Any, int]] | None = None
        self._host: Any = None
        self._pid = 0
        self._ready = False
        self._ended: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()
        self._follower: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """Whether the process lives, or still waits for its place."""
        return not self._ended.done()

    @property
    def was_ready(self) -> bool:
        return self._ready

    @property
    def pid(self) -> int:
        return self._pid

    async def start(self) -> None:
        """Raises ProcessFailedError when the process got no place or was told to end meanwhile, and UnavailableError
        when NATS did not come up."""
        self._placing = asyncio.create_task(self._place(), name=f"place {self.name}")
        try:
            await asyncio.wait({self._placing})
            self._host, self._pid = self._placing.result()
        except BaseException as error:
            self._placing.cancel()
            self._ended.set_result(self._exit())
            if self.stopping:
                raise ProcessFailedError(self.name, "has ended before it was ready") from error
            if isinstance(error, RayActorError):
                raise ProcessFailedError(self.name, f"lost its actor before it was ready: {error}") from error
            raise
        self._follower = asyncio.create_task(self._follow())

    async def wait_ready(self, timeout_s: float) -> Ready:
        try:
            async with asyncio.timeout(timeout_s + HOST_TIMEOUT_S):
                ready: Ready = await answer(self._host.wait_ready.remote(timeout_s))
        except (RayActorError, TimeoutError) as error:
            raise ProcessFailedError(self.name, f"lost its actor before it was ready: {error}") from error
        self._ready = True
        return ready

    async def wait(self) -> ProcessExit:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: signal.Signals) -> None:
        if self._host is not None:
            self._host.send_signal.remote(int(number))

    async def stop(self, timeout_s: float) -> bool:
        if self._host is None:
            await self.kill()
            return True
        return await super().stop(timeout_s)

    async def kill(self) -> None:
        """SIGKILL. When the actor does not answer, the process counts as ended; releasing it kills the actor too."""
        self.stopping = True
        if self._placing is not None and not self._placing.done():
            self._placing.cancel()
        self.send_signal(signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.wait(), HOST_TIMEOUT_S)
        if self.alive:
            self._ended.set_result(self._exit())

    async def _follow(self) -> None:
        """Waits for the end. An actor that cannot be reached is asked again until Ray says that it is dead."""
        ended = None
        while ended is None:
            try:
                ended = await answer(self._host.wait.remote())
            except ActorUnavailableError:
                await asyncio.sleep(AGAIN_S)
            except RayError:
                ended = self._exit()
        if self.alive:
            self._ended.set_result(ended)

    def _exit(self) -> ProcessExit:
        return ProcessExit(self.name, self._pid, None)
