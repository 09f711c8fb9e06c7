"""Work that a thread does again and again, and once more at the end."""

import threading
from collections.abc import Callable

INTERVAL_S = 0.1
CLOSE_S = 5.0  # for work that does not return, as on a stderr that takes nothing


class RepeatedWork:
    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._work = work
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join(CLOSE_S)

    def _repeat(self) -> None:
        while not self._ending.wait(INTERVAL_S):
            self._work()
        self._work()
