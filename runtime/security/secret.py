"""Keys and passwords: objects that no log, error or dump shows, read from files and variables."""

import os
import stat
from pathlib import Path
from typing import NoReturn

from runtime.errors import ConfigError

MIN_LENGTH = 32  # characters of a key of ours: nobody must find it by trying, on a recorded proof or on a port
HOW_TO_MAKE = "made by `openssl rand -hex 32`"
OTHERS = stat.S_IRWXO


class Secret:
    """Text that only `reveal()` shows."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Secret(***)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("secrets travel by environment and files only")


def read_secrets(path: str, field: str, min_length: int = 1) -> list[Secret]:
    """The secrets in a file, one per line. Raises ConfigError that names `field` and shows nothing of the file."""
    return parse_secrets(read_file(path, field), f"{field}: {path}", min_length)


def parse_secrets(text: str, where: str, min_length: int = 1) -> list[Secret]:
    """One per line. Raises ConfigError when there is none, or one is too short or does not fit into a header."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not (key := line.strip()):
            continue
        if not all("!" <= character <= "~" for character in key):
            raise ConfigError(where, f"line {number} holds more than one word, or characters other than ASCII")
        if len(key) < min_length:
            problem = f"line {number} has {len(key)} characters; at least {min_length} are needed, {HOW_TO_MAKE}"
            raise ConfigError(where, problem)
        found.append(Secret(key))
    if not found:
        raise ConfigError(where, "holds no key")
    return found


def read_file(path: str, field: str) -> str:
    """A file with secrets. Raises ConfigError, also when users beside its owner and its group may read it."""
    try:
        with Path(path).open() as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISREG(mode) and mode & OTHERS:
                raise ConfigError(field, f"{path}: every user of this machine can read or change it: chmod 600 {path}")
            return file.read()
    except OSError as error:
        raise ConfigError(field, f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(field, f"{path}: is not text") from error


def state_of(file: str | None) -> tuple[int, int, int] | None:
    """Inode, time and size, one of which changes with the file; None: the file cannot be read."""
    try:
        stat = os.stat(file) if file is not None else None
    except OSError:
        return None
    return (stat.st_ino, stat.st_mtime_ns, stat.st_size) if stat is not None else None
