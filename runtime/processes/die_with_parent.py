"""Ties a child's life to its parent's: the kernel kills the child when the parent ends, however it ends."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

# Loaded at import, because nothing may be loaded between fork and exec.
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(parent_pid: int | None = None) -> None:
    """This process gets SIGKILL when the parent *thread* that started it ends, also after an exec.

    Invariant: parents start children from a thread that stays. With `parent_pid`, this process also ends when the
    parent had ended before this call. Does nothing elsewhere than on Linux.
    """
    if _libc is None:
        return
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)
