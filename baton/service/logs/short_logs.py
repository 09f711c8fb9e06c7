"""Keeps the logs of a run short, whether anybody reads them or not."""

import contextlib
from pathlib import Path

from baton.service.logs.log_file import shorten
from baton.service.logs.repeated_work import RepeatedWork


class ShortLogs(RepeatedWork):
    """A log that is longer than `long_bytes` goes on as an empty file, and what it held lies beside it."""

    def __init__(self, long_bytes: int) -> None:
        self._long_bytes = long_bytes
        self._paths: tuple[Path, ...] = ()
        super().__init__(self._shorten, "shorten logs")

    def add(self, path: Path) -> None:
        self._paths = (*dict.fromkeys((*self._paths, path)),)

    def _shorten(self) -> None:
        for path in self._paths:
            with contextlib.suppress(OSError):
                shorten(path, self._long_bytes)
