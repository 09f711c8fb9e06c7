"""`python -m engine.vllm.guard GROUP`: ends what vLLM has started when the worker is gone, however it ended.

vLLM's core process does not notice that the process that started it was killed: it would keep its memory for ever. The
guard waits on its standard input, which ends with the worker; then it kills the worker's process group.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CLEANER = b"resource_tracker"  # Python's, which removes shared memory when all others have ended


def start_guard() -> "subprocess.Popen[bytes]":
    """Called before vLLM starts anything. This process becomes the leader of its process group, which the group's other
    processes do not outlive."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    command = [sys.executable, "-P", "-m", __name__, str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def main() -> None:
    sys.stdin.buffer.read()
    for pid in _members(int(sys.argv[1])):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _members(group: int) -> Iterator[int]:
    """The processes of a group."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            pid = int(entry.name) if entry.name.isdecimal() else 0
            if pid and os.getpgid(pid) == group and CLEANER not in (entry / "cmdline").read_bytes():
                yield pid


if __name__ == "__main__":
    main()
