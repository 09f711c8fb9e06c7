"""An asyncio event loop whose time is simulated: where another would wait, its clock jumps to the next timer.

Whatever runs on it is the code that runs live: `asyncio.sleep`, timeouts and tasks just work, and a day takes as long
as its computing. There is no I/O on it.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NothingToRead(selectors.SelectSelector):
    """Reports no I/O, and takes the time it was to wait as passed."""

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
        """Simulated seconds since the loop was made."""
        return self._simulated.now_s


def run_simulated(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=SimulatedEventLoop) as runner:
        return runner.run(main)
