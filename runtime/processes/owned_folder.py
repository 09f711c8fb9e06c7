"""Folders that one process owns: it holds a lock on its folder, which ends with the process, however that ends.

Who makes such a folder removes those beside it whose owners are dead. What cleans /tmp leaves locked folders alone.
"""

import errno
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from runtime.errors import ConfigError

PREFIX = "baton-run-"  # of the folders for temporary files


class OwnedFolder:
    """A new folder of mode 0700 with the first of `names` that is free, holding `files` (text by name, mode 0600) from
    its first moment on. Raises OSError."""

    def __init__(self, parent: Path, names: Iterable[str], files: Mapping[str, str] | None = None) -> None:
        made = Path(tempfile.mkdtemp(prefix=".baton-", dir=parent))  # a name that `living` does not look for
        self._lock = os.open(made, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        for name, text in (files or {}).items():
            write_private(made / name, text)
        for name in names:
            try:
                self.path = made.rename(parent / name)
                return
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(parent))

    def close(self) -> None:
        """Removes the folder. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def temporary_folder(prefix: str = PREFIX) -> OwnedFolder:
    """A folder for what one process and its children write. Removes those that killed processes have left."""
    parent = temporary_parent()
    living(parent, prefix + "*")
    return OwnedFolder(parent, [prefix + secrets.token_hex(4)])


def temporary_parent() -> Path:
    """Raises ConfigError."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ConfigError("TMPDIR", "there is no folder here that we may write to: name one") from error


def living(parent: Path, pattern: str = "[!.]*") -> list[Path]:
    """The folders in `parent` whose owners live. Removes the others, unless they belong to another user."""
    return [path for path in sorted(parent.glob(pattern)) if _lives(path)]


def write_private(path: Path, text: str) -> None:
    """Replaces the file at once. Raises OSError."""
    new = path.with_name(f".{path.name}")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    new.rename(path)


def _lives(path: Path) -> bool:
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            return False
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(folder), path.stat()):  # else it was removed, and made anew by a living one
            shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(folder)
    return False
