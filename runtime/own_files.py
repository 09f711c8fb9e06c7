"""Folders and files that nobody but this user, or root, can have written: what Baton keeps on disks and believes later.

Whoever can write such a folder chooses what we compute with and, by a link, which of our files we write over. So a
folder counts only if it is ours and closed to others, and what is in it is opened by its descriptor, never through a
link. Each refusal is a sentence with the folder, what is wrong, and the way out.
"""

import errno
import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from runtime.errors import ConfigError

WRITTEN: Final = 0o022
"""Bits of a mode that let others write."""

SEEN: Final = 0o077
"""Bits of a mode that let others read or write."""

ROOT: Final = 0


def open_folder(path: Path | str, taboo: int = WRITTEN, within: int | None = None, make: bool = True) -> int:
    """A descriptor of the folder, which is made with mode 0700 when it is missing. `taboo`: bits that its mode may not
    have. `within`: the folder that holds it. Raises OSError."""
    if make:
        with suppress(FileExistsError):
            try:
                os.mkdir(path, 0o700, dir_fd=within)
            except FileNotFoundError:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                os.mkdir(path, 0o700)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return _checked(_opened(path, flags, 0, within), path, taboo, within)


def make_folder(path: Path, where: str) -> None:
    """Makes the folder that the setting `where` names. Raises ConfigError when it does not count, or we may not write
    to it."""
    with as_config_error(path, where), opened_folder(path):
        check_writable(path)


@contextmanager
def as_config_error(path: Path, where: str) -> Iterator[None]:
    """Turns an OSError of the block into a ConfigError: `where`, the path, and why it cannot be used."""
    try:
        yield
    except OSError as error:
        raise ConfigError(where, f"{path}: {error.strerror}" if error.strerror else str(error)) from error


def check_writable(path: Path) -> None:
    """Raises PermissionError."""
    if not os.access(path, os.W_OK):
        raise PermissionError(f"{path}: nobody here may write to it")


@contextmanager
def opened_folder(
    path: Path | str, taboo: int = WRITTEN, within: int | None = None, make: bool = True
) -> Iterator[int]:
    """Opens a folder as open_folder() does, and closes it at the end of the block."""
    folder = open_folder(path, taboo, within, make)
    try:
        yield folder
    finally:
        os.close(folder)


def open_file(path: Path | str, flags: int, taboo: int = SEEN, within: int | None = None, mode: int = 0o600) -> int:
    """A descriptor of a plain file, which O_CREAT makes with `mode`, or of a device such as /dev/null. A file with a
    second name is refused, because the other name may stand where others read it. Raises OSError."""
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe does not hold us up
    file = _checked(_opened(path, flags, mode, within), path, taboo, within)
    found = os.fstat(file)
    is_plain = stat.S_ISREG(found.st_mode) or (stat.S_ISCHR(found.st_mode) and found.st_uid == ROOT)
    if not is_plain or found.st_nlink > 1:
        os.close(file)
        problem = "has a second name" if is_plain else "is no plain file"
        raise PermissionError(f"{_shown(path, within)} {problem}: remove it")
    return file


def open_log(path: Path | str) -> int:
    """A descriptor of a log, to be appended to. Raises OSError."""
    return open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, taboo=0, mode=0o644)


def reopen_log(path: Path | str, descriptor: int) -> None:
    """What is written to `descriptor` goes from now on to the file that has this name now. Raises OSError."""
    file = open_log(path)
    os.dup2(file, descriptor, inheritable=os.get_inheritable(descriptor))
    os.close(file)


def check_holds_own(folder: int) -> None:
    """Raises PermissionError when something in the folder is a link, or somebody else's: it was laid there before the
    folder was closed to others."""
    for name in os.listdir(folder):
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode) or found.st_uid not in (os.geteuid(), ROOT):
            raise PermissionError(f"{_shown(name, folder)} is a link, or belongs to another user: remove it")


def is_own(path: Path, taboo: int = WRITTEN) -> bool:
    """Whether this is a folder that counts."""
    try:
        os.close(open_folder(path, taboo, make=False))
    except OSError:
        return False
    return True


def may_be_replaced(folder: Path) -> bool:
    """Whether others can put something of theirs in the place of what is ours in this folder, which its sticky bit
    prevents. Raises OSError."""
    found = folder.stat()
    is_open = bool(found.st_mode & WRITTEN) and not found.st_mode & stat.S_ISVTX
    return is_open or found.st_uid not in (os.geteuid(), ROOT)


def _opened(path: Path | str, flags: int, mode: int, within: int | None) -> int:
    try:
        return os.open(path, flags, mode, dir_fd=within)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and _is_link(path, within):
            way_out = "name what it leads to" if within is None else "remove it"
            raise PermissionError(f"{_shown(path, within)} is a symbolic link: {way_out}") from error
        raise


def _is_link(path: Path | str, within: int | None) -> bool:
    with suppress(OSError):
        return stat.S_ISLNK(os.stat(path, dir_fd=within, follow_symlinks=False).st_mode)
    return False


def _checked(file: int, path: Path | str, taboo: int, within: int | None) -> int:
    found, user = os.fstat(file), os.geteuid()
    is_strange = found.st_uid not in (user, ROOT)
    if not is_strange and not found.st_mode & taboo:
        return file
    os.close(file)
    name = _shown(path, within)
    if is_strange:
        way_out = "remove it" if within is not None else "name one that does not exist yet, or is yours"
        raise PermissionError(f"{name} belongs to user {found.st_uid}, not to {user}: {way_out}")
    may = "write" if found.st_mode & taboo & WRITTEN else "read"
    change = f"chmod {'go-w' if taboo == WRITTEN else 'go-rwx'} {shlex.quote(name)}"
    way_out = f"name one that does not exist yet, or, if all that it holds is yours, {change}"
    raise PermissionError(f"{name} lets others {may} it (mode {stat.S_IMODE(found.st_mode):04o}): {way_out}")


def _shown(path: Path | str, within: int | None) -> str:
    return str(path) if within is None else os.path.join(os.readlink(f"/proc/self/fd/{within}"), path)
