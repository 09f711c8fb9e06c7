"""The log of a process, as it is made and opened for writing."""

import errno
import os
from pathlib import Path
from typing import BinaryIO

from runtime.own_files import as_config_error, check_writable, open_log

LOG_DIR_FLAG = "--log-dir"


def opened_log(path: Path | None) -> BinaryIO:
    """The log, to be appended to; None: what is written is lost. What is not a file of ours is refused, because in a
    folder for many users the name may be a link to another file of ours. Raises ConfigError."""
    if path is None:
        return os.fdopen(os.open(os.devnull, os.O_WRONLY), "wb", buffering=0)
    with as_config_error(path, LOG_DIR_FLAG):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open_log(path)
    return os.fdopen(file, "ab", buffering=0)


def make_log_folder(folder: Path) -> None:
    """Raises ConfigError."""
    with as_config_error(folder, LOG_DIR_FLAG):
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder)
