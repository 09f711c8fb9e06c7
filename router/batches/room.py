"""How many lines of batches may be in flight at once: as many as what interactive requests leave of the workers."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

from router.requests.admission import AdmissionQueue
from router.workers.load import LoadLedger
from router.workers.pool import WorkerPool
from runtime.within import happens

MAX_LINES: Final = 256  # of all batches of this router
MAX_BYTES: Final = 64 << 20  # of these lines; one alone may be larger
SHARE: Final = 2  # one part in so many of what the workers can run: a newcomer finds a place, and steps stay short
LOOK_S: Final = 0.01  # between two looks at the workers

Look = Callable[[int], float | None]
"""Gets the number of lines in flight. None: there is no room for one more; otherwise how many seconds later to look for
the next one."""


class Room:
    """Lines enter in the order in which they came."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._lines = self._bytes = 0
        self._next_s = 0.0  # time.monotonic()
        self._turn = asyncio.Lock()  # who waits longest holds it
        self._left = asyncio.Event()

    async def enter(self, num_bytes: int) -> None:
        """Each line that has entered has to leave()."""
        async with self._turn:
            while not self._takes(num_bytes):
                self._left.clear()
                await happens(self._left, LOOK_S)
            self._lines += 1
            self._bytes += num_bytes

    def leave(self, num_bytes: int) -> None:
        self._lines -= 1
        self._bytes -= num_bytes
        self._left.set()

    def _takes(self, num_bytes: int) -> bool:
        fits = not self._lines or (self._lines < MAX_LINES and self._bytes + num_bytes <= MAX_BYTES)
        now_s = time.monotonic()
        if not fits or now_s < self._next_s or (pause_s := self._look(self._lines)) is None:
            return False
        self._next_s = now_s + pause_s
        return True


def beside_others(pool: WorkerPool, ledger: LoadLedger, queue: AdmissionQueue, each: int) -> Look:
    """There is room while no request waits here, and fewer run than a SHARE of what decode workers run, `each`. Beside
    others, one line after the other goes to a worker without prompts, because a step takes the longer the more prompts
    it computes. Requests of other routers are in the workers' reports. Without a worker one line finds out."""

    def look(lines: int) -> float | None:
        decode, view = pool.decode_keys(), queue.view()
        loads = [ledger.reported(key) for key in decode]
        running = max(view.running, lines, sum(load.running + load.waiting for load in loads))
        if view.waiting or running >= max(1, len(decode) * each // SHARE):
            return None
        if running == lines:
            return 0.0
        prompts_at = pool.prefill_keys() or decode
        return LOOK_S if any(not ledger.view(key).queued_prefill_tokens for key in prompts_at) else None

    return look


def in_all(looks: Sequence[Look]) -> Look:
    """Lines may ask for any of several models: there is room while each has some."""

    def look(lines: int) -> float | None:
        pauses = [each(lines) for each in looks]
        return None if None in pauses else max(pause for pause in pauses if pause is not None)

    return look
