"""What this process holds of the machine: open files, and shared memory."""

import gc
import os
from pathlib import Path


def open_files() -> set[tuple[str, str]]:
    """(descriptor, what it is open on) of this process. A leak is what is here afterwards and was not before;
    that something of an earlier test is gone by then is none."""
    gc.collect()
    opened = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            opened.add((descriptor, os.readlink(f"/proc/self/fd/{descriptor}")))
        except FileNotFoundError:  # the one that listed the folder
            continue
    return opened


def shared_bytes() -> int:
    """Shared memory that this process has touched."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssShmem"))
