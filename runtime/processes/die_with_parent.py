"""Ties a child's life to its parent's: the kernel kills the child when the parent ends, however it ends.

Called in the child, first thing after its start (see launch.py). The setting survives exec.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

# Loaded here because nothing may be loaded between fork and exec.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(parent_pid: int | None = None) -> None:
    """SIGKILL for us when the parent *thread* that started us ends: parents must start children from a thread that
    stays.

    With `parent_pid` a parent that ended before this call is noticed too, and the process ends at once. Elsewhere
    than on Linux there is no such thing and nothing happens.
    """
    if _libc is None:
        return
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)
