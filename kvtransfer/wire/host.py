"""Which machine this is. Two processes with the same host id share a kernel, so they may share memory."""

from functools import cache
from pathlib import Path
from uuid import getnode

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def host_id() -> str:
    """The kernel's boot id; where there is none, the network card's address."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"node-{getnode():012x}"
