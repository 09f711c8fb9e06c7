"""Stops a process as SIGSTOP does, and returns when none of its threads runs any more."""

import os
import signal
import time
from pathlib import Path

TIMEOUT_S = 60.0
POLL_S = 0.001


def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    deadline_s = time.monotonic() + TIMEOUT_S
    while not _stopped(pid):
        assert time.monotonic() < deadline_s, f"process {pid} was not stopped"
        time.sleep(POLL_S)


def _stopped(pid: int) -> bool:
    """State is the first field behind the name, which ends with the last parenthesis (man 5 proc)."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] in "TtXZ" for stat in stats)
