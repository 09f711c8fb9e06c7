"""Tells a process that hangs from one that merely waits for a core or a disk."""

import contextlib
from pathlib import Path
from typing import Final

NS: Final = 1e9


class Silence:
    """How long a process has said nothing, by our looks at it.

    We count our looks and read no clock: after a time in which we did not run either, the process is not silent for
    longer than one look. The first look counts nothing, because the process may have been heard just before it. What it
    waits for a core in the second half of the limit is taken off, so that the limit follows the load; a wait for a disk
    while it lasts.
    """

    def __init__(self, look_s: float, limit_s: float, pid: int | None) -> None:
        """`look_s`: between two looks. `pid`: of a thread group whose first thread runs the event loop that speaks;
        None: of another machine, or not known."""
        self._look_s, self._limit_s = look_s, limit_s
        self._proc = None if pid is None else Path(f"/proc/{pid}")
        self.heard()

    def heard(self) -> None:
        self._looks = self._looks_held_up = 0
        self._times_s: tuple[float, float] | None = None

    def look(self) -> bool:
        """Whether the process has been silent for the limit at least, now that another `look_s` is over."""
        self._looks += 1
        silent_s = (self._looks - 1) * self._look_s
        if self._proc is not None and silent_s >= self._limit_s / 2:
            silent_s -= self._waited_s(self._proc)
        return silent_s >= self._limit_s

    def _waited_s(self, proc: Path) -> float:
        """The kernel counts a wait when it ends, so the present one counts by our looks."""
        ran_s, waited_s = _core_times(proc)
        last_s, first_s = self._times_s or (ran_s, waited_s)
        waits = self._times_s is not None and ran_s == last_s and _is_held_up(proc)
        self._looks_held_up = self._looks_held_up + 1 if waits else 0
        self._times_s = ran_s, first_s
        return waited_s - first_s + self._looks_held_up * self._look_s


def _core_times(proc: Path) -> tuple[float, float]:
    """Seconds in which the thread ran, and in which it could run and had no core, without the wait that has not ended.
    Source: Documentation/scheduler/sched-stats.rst."""
    with contextlib.suppress(OSError, ValueError):  # a kernel that does not count them, or the end
        ran_ns, waited_ns, _ = map(int, (proc / "schedstat").read_text().split())
        return ran_ns / NS, waited_ns / NS
    return 0.0, 0.0


def _is_held_up(proc: Path) -> bool:
    """By the kernel, which has no core for it, or a disk that does not answer."""
    with contextlib.suppress(OSError):
        return (proc / "stat").read_text().rpartition(")")[2].split()[0] in ("R", "D")
    return False
