"""The logs of a run whose processes write to files, shown on our own stderr."""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from baton.service.logs.log_file import shorten
from baton.service.logs.merged_logs import SUFFIX, MergedLogs
from baton.service.nats_server import NATS

INTERVAL_S = 0.1
CLOSE_S = 5.0  # for a stderr that takes nothing
STDERR = 2


class ShownLogs:
    """A thread that copies what comes, but for NATS's, and one that keeps the files short, also while our stderr takes
    nothing. No process waits for our stderr."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logs = MergedLogs(folder)
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=[work], name=f"{work.__name__} logs", daemon=True)
            for work in (self._shorten, self._copy)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Shows what is left."""
        self._ending.set()
        for thread in self._threads:
            thread.join(CLOSE_S)

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._ending.wait(INTERVAL_S):
            work()
        work()

    def _copy(self) -> None:
        with contextlib.suppress(OSError):
            for entry in self._logs.news():
                if entry.process != NATS:
                    _write(entry.text.encode())

    def _shorten(self) -> None:
        for path in self._folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                shorten(path)


def _write(data: bytes) -> None:
    """Writes past `sys.stderr`: its lock, held by a write that does not return, would keep Python from exiting."""
    while data:
        data = data[os.write(STDERR, data) :]
