"""Leaves a process with a session of its own about a percent of one core."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CORE = max(os.sched_getaffinity(0))
SPIN = "print(flush=True)\nwhile True: pass"
BUSY = ["taskset", "-c", str(CORE), sys.executable, "-c", SPIN]


@contextlib.contextmanager
def busy_core(pid: int) -> Iterator[None]:
    assert os.getsid(pid) == pid, "its session's share of a core would be ours, too"
    os.sched_setaffinity(pid, {CORE})
    os.setpriority(os.PRIO_PROCESS, pid, 19)
    with contextlib.suppress(FileNotFoundError):
        Path(f"/proc/{pid}/autogroup").write_text("19")  # else its session gets as much as ours
    busy = [subprocess.Popen(BUSY, stdout=subprocess.PIPE) for _ in range(3)]
    try:
        for process in busy:
            assert process.stdout is not None
            process.stdout.readline()  # it spins
        yield
    finally:
        for process in busy:
            with process:
                process.kill()
