"""Which machine this is, and which of its processes. Two processes with the same host id share a kernel, so they may
share memory."""

import os
from functools import cache
from pathlib import Path
from uuid import getnode

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PIDS = Path("/proc/self/ns/pid")  # of a container: others number their processes anew


@cache
def host_id() -> str:
    """The kernel's boot id; where there is none, the network card's address."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"node-{getnode():012x}"


def process_name() -> str:
    """Names this process among those of all machines and containers."""
    return f"{_numbered_by()} {os.getpid()}"


def pid_here(name: str) -> int | None:
    """The id of a process with this `process_name`; None where we number processes otherwise, or the name is none."""
    where, _, pid = name.rpartition(" ")
    return int(pid) if where == _numbered_by() and pid.isdecimal() else None


@cache
def _numbered_by() -> str:
    try:
        return f"{host_id()} {_PIDS.readlink()}"
    except OSError:
        return host_id()
