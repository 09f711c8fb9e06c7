"""What several games on one machine must not share: a number of their own, for names, addresses and ports."""

import fcntl
import functools
import os
import tempfile
from pathlib import Path

MOST = 200
FIRST_PORT = 12000  # below the ports that the kernel gives out by itself, because a server comes back on its port
PORTS_PER_SLOT = 90


@functools.cache
def slot() -> int:
    """The lowest number that no other process has; the kernel gives it back when this process ends."""
    for number in range(MOST):
        path = Path(tempfile.gettempdir()) / f"baton-chaos-{os.geteuid()}-{number}.lock"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
        else:
            return number
    raise RuntimeError(f"{MOST} games run on this machine")


def ports() -> range:
    first = FIRST_PORT + slot() * PORTS_PER_SLOT
    return range(first, first + PORTS_PER_SLOT)
