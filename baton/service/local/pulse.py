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
        self._proc = Path(f"/proc/{pid}")
        self.beat()

    def beat(self) -> None:
        self._looks = self._looks_without_core = 0
        self._waited_s, self._slices = self._core_waits()

    async def stopped(self) -> None:
        """Returns when the beats have stopped.

        We count our own looks and read no clock: after a time in which we did not run either, the process is not
        silent for longer than one look. What it waited for a core is taken off, so that the bound follows the load.
        """
        while True:
            waited_s, slices = self._core_waits()
            self._looks_without_core = self._looks_without_core + 1 if slices == self._slices and self._can_run() else 0
            self._slices = slices
            looks = self._looks - self._looks_without_core
            if looks * BEAT_S - (waited_s - self._waited_s) >= SILENT_S:
                return
            await asyncio.sleep(BEAT_S)
            self._looks += 1

    def _core_waits(self) -> tuple[float, int]:
        """Seconds in which the thread could run and had no core, without the wait that has not ended, and how often it
        had one. Source: Documentation/scheduler/sched-stats.rst."""
        with contextlib.suppress(OSError, ValueError):  # a kernel that does not count them, or the end
            _, waited_ns, slices = map(int, (self._proc / "schedstat").read_text().split())
            return waited_ns / NS, slices
        return 0.0, 0

    def _can_run(self) -> bool:
        with contextlib.suppress(OSError):
            return (self._proc / "stat").read_text().rpartition(")")[2].split()[0] == "R"
        return False
