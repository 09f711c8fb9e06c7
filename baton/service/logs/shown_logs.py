"""The logs of a run whose processes write to files, shown on our own stderr."""

import contextlib
import sys
import threading
from pathlib import Path

from baton.service.logs.log_file import shorten
from baton.service.logs.merged_logs import SUFFIX, MergedLogs
from baton.service.nats_server import NATS

INTERVAL_S = 0.1
CLOSE_S = 5.0  # for a stderr that takes nothing


class ShownLogs:
    """A thread that copies what comes, but for NATS's, and keeps the files short. No process waits for our stderr."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logs = MergedLogs(folder)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="shown logs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Shows what is left."""
        self._ending.set()
        self._thread.join(CLOSE_S)

    def _follow(self) -> None:
        while not self._ending.wait(INTERVAL_S):
            self._copy()
        self._copy()

    def _copy(self) -> None:
        with contextlib.suppress(OSError):
            for entry in self._logs.news():
                if entry.process != NATS:
                    sys.stderr.write(entry.text)
            sys.stderr.flush()
        for path in self._folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                shorten(path)
