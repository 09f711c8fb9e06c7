"""What processes leave in /tmp and in /dev/shm."""

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
OURS = ("nats", "filler", "kv")  # of tests/chaos itself, as logs are, and what workers are to keep
STRANGERS = ("psm_", "sem.mp-")  # how Python's multiprocessing names its own; no process of a service uses it
SWEPT_AFTER_S = 60.0  # a worker's start sweeps what is older and belongs to nobody


def shared_memory() -> set[str]:
    found = os.listdir(SHARED_MEMORY) if SHARED_MEMORY.exists() else []
    return {name for name in found if not name.startswith(STRANGERS)}


def left_in_shared_memory(before: Collection[str]) -> list[str]:
    """What is new and is used by no process that lives. Others on this machine may use theirs."""
    new = shared_memory() - set(before)
    if not new:
        return []
    used: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            paths = [one.path for one in (*process.memory_maps(), *process.open_files())]
            used |= {Path(path).name for path in paths if path.startswith(f"{SHARED_MEMORY}/")}
    return [f"/dev/shm/{name}" for name in sorted(new - used) if (SHARED_MEMORY / name).exists()]


def left_in_folder(folder: Path, last_start_s: float) -> list[str]:
    """`last_start_s`: time of day at which the last worker started. What was older than SWEPT_AFTER_S by then was its
    to sweep."""
    left = []
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):
            if path.suffix != ".log" and path.name not in OURS and path.stat().st_mtime + SWEPT_AFTER_S < last_start_s:
                left.append(f"{path.name} in the folder for temporary files")
    return left
