"""How long a block takes to be read where several threads read at a time."""

import threading
from math import inf

DECAY = 0.95  # of what reads took, with each block


class ReadTimes:
    """Any thread. A read's time is shared by those that went on beside it, so that the first ones of many, which end
    together, do not make the disk seem as slow as if it read one block after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, tuple[float, int]] = {}  # copy -> when it began, and how many went on then
        self._blocks = self._seconds = 0.0  # of the last reads

    @property
    def block_s(self) -> float:
        """Seconds for one block; 0 before the first: no disk is slow at first."""
        with self._lock:
            return self._seconds / self._blocks if self._blocks else 0.0

    def begin(self, copy: int, now_s: float) -> None:
        with self._lock:
            self._running[copy] = now_s, len(self._running) + 1

    def end(self, copy: int, now_s: float) -> None:
        with self._lock:
            num_running = len(self._running)
            began_s, at_first = self._running.pop(copy)
            self._blocks = DECAY * self._blocks + 1
            self._seconds = DECAY * self._seconds + (now_s - began_s) / max(at_first, num_running)

    def longest_s(self, now_s: float) -> float:
        """How long the oldest read that goes on has taken; 0 when none does."""
        with self._lock:
            return max(0.0, now_s - min((began_s for began_s, _ in self._running.values()), default=inf))
