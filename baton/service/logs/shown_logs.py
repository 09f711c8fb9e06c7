"""The logs of a run whose processes write to files, shown on our own stderr."""

import contextlib
import os
from pathlib import Path

from baton.service.launcher import NATS
from baton.service.logs.merged_logs import MergedLogs
from baton.service.logs.repeated_work import RepeatedWork

STDERR = 2


class ShownLogs(RepeatedWork):
    """Copies what comes, but for NATS's, and at its close what is left. No process waits for our stderr."""

    def __init__(self, folder: Path) -> None:
        self._logs = MergedLogs(folder)
        super().__init__(self._copy, "copy logs")

    def _copy(self) -> None:
        with contextlib.suppress(OSError):
            for entry in self._logs.news():
                if entry.process != NATS:
                    _write(entry.text.encode())


def _write(data: bytes) -> None:
    """Writes past `sys.stderr`: its lock, held by a write that does not return, would keep Python from exiting."""
    while data:
        data = data[os.write(STDERR, data) :]
