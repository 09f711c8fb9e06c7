"""An asyncio event loop in simulated time: instead of waiting, its clock jumps to the next timer.

Code of the live service runs on this loop unchanged: `asyncio.sleep`, timeouts and tasks work, but no I/O.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NothingToRead(selectors.SelectSelector):
    """Reports no I/O, and advances the clock by the time that it should wait."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everything in the simulation waits for something that never comes")
        self.now_s += max(0.0, timeout)
        return []


class SimulatedEventLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._simulated = _NothingToRead()
        super().__init__(self._simulated)

    def time(self) -> float:
        """Simulated seconds since the loop was created."""
        return self._simulated.now_s


def run_simulated(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=SimulatedEventLoop) as runner:
        return runner.run(main)
