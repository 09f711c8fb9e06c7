"""The private folder of a receiver's Unix socket, and those that killed processes left behind."""

import contextlib
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

SOCKET = "kv.sock"
PREFIX = "baton-kv-"
MIN_AGE_S = 60.0  # younger ones may be about to listen


def create_socket_folder() -> Path:
    """A new folder with mode 0700: who can connect to its socket can write the slab. Sweeps out the dead ones."""
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with contextlib.suppress(OSError):
            if _is_ours_and_old(folder) and _nobody_listens(folder / SOCKET):
                shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=PREFIX))


def _is_ours_and_old(folder: Path) -> bool:
    stat = folder.stat()
    return stat.st_uid == os.geteuid() and time.time() - stat.st_mtime > MIN_AGE_S


def _nobody_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except BlockingIOError:  # its queue is full
            return False
    return False
