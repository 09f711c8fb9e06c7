"""An actor whose log, a file on its node, can be read from anywhere in the cluster."""

import os
from pathlib import Path

from baton.service.log_file import log_since, log_tail


class LoggedActor:
    log_file: Path

    async def log_tail(self, lines: int) -> tuple[str, int]:
        return log_tail(self.log_file, lines)

    async def log_since(self, offset: int) -> tuple[str, int]:
        return log_since(self.log_file, offset)


def own_stderr() -> Path:
    """The file in Ray's folder of logs that gets this actor's own output."""
    return Path(os.readlink("/proc/self/fd/2"))
