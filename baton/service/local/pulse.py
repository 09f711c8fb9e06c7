"""Tells a process that hangs from one that merely waits for a core."""

import asyncio
import contextlib
from pathlib import Path
from typing import Final

from runtime.processes.serving import BEAT_S

SILENT_S: Final = 5.0  # without a beat, in which the process had a core or slept: then it hangs
NS: Final = 1e9


class Pulse:
    """The beats of a process. `pid`: of a thread group whose first thread runs the event loop that beats."""

    def __init__(self, pid: int) -> None:
        self._schedstat = Path(f"/proc/{pid}/schedstat")
        self.beat()

    def beat(self) -> None:
        self._looks, self._waited_s = 0, self._core_wait_s()

    async def stopped(self) -> None:
        """Returns when the beats have stopped.

        We count our own looks and read no clock: after a time in which we did not run either, the process is not
        silent for longer than one look. What it waited for a core is taken off, so that the bound follows the load.
        """
        while self._looks * BEAT_S - (self._core_wait_s() - self._waited_s) < SILENT_S:
            await asyncio.sleep(BEAT_S)
            self._looks += 1

    def _core_wait_s(self) -> float:
        """Seconds in which the thread could run and had no core. Source: Documentation/scheduler/sched-stats.rst."""
        with contextlib.suppress(OSError, ValueError, IndexError):  # a kernel that does not count them, or the end
            return int(self._schedstat.read_text().split()[1]) / NS
        return 0.0
