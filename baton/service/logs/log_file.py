"""A process's log: read while it is being written, and kept short."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import NamedTuple

TAIL_BYTES = 1024 * 1024  # at the end of the log, where its last lines are looked for
PIECE_BYTES = 1024 * 1024
LONG_BYTES = 8 * 1024 * 1024

NEVER = -1
RIGHT_NOW = 0


class Position(NamedTuple):
    """How far a log has been read. A log that was shortened since then goes on in the file beside it."""

    offset: int = 0
    shortened_ns: int = NEVER


def log_tail(path: Path, lines: int) -> tuple[str, Position]:
    """The last lines of the log, and the position behind them. Raises OSError."""
    data, end = _end_of(path, TAIL_BYTES)
    position = Position(end, _shortened_ns(path))
    if len(data) < TAIL_BYTES:
        with contextlib.suppress(FileNotFoundError):
            data = _end_of(older(path), TAIL_BYTES - len(data))[0] + data
    last = data.splitlines(keepends=True)[-lines:] if lines else []
    return b"".join(last).decode(errors="replace"), position


def log_since(path: Path, position: Position) -> tuple[str, Position]:
    """About PIECE_BYTES of what was written behind `position`, in whole lines, and the position behind them. Lines
    are left out when the log was shortened twice meanwhile. Raises OSError."""
    offset, known_ns = position
    if path.stat().st_size < offset:
        offset = 0  # unless the log was shortened, somebody else has emptied it
    data = _piece(path, offset)
    shortened_ns = _shortened_ns(path)  # looked up last: if it is the known time, all of the above is of one file
    if shortened_ns == known_ns:
        whole = _whole_lines(data)
        return whole.decode(errors="replace"), Position(offset + len(whole), known_ns)
    if shortened_ns == RIGHT_NOW:
        return "", position
    data = _piece(older(path), position.offset)
    if len(data) == PIECE_BYTES:
        whole = _whole_lines(data)
        return whole.decode(errors="replace"), Position(position.offset + len(whole), known_ns)
    text, position = log_since(path, Position(0, shortened_ns))
    return data.decode(errors="replace") + text, position


def shorten(path: Path) -> None:
    """Moves what a long log holds into the file beside it, whose former content goes. A line that is written at that
    moment may be lost. Invariant: who writes the log appends to it. Raises OSError."""
    if path.stat().st_size > LONG_BYTES:
        copy = path.with_name(f"{path.name}.new")
        shutil.copyfile(path, copy)
        os.utime(copy, ns=(RIGHT_NOW, RIGHT_NOW))
        copy.replace(older(path))
        os.truncate(path, 0)
        os.utime(older(path))


def older(path: Path) -> Path:
    """The file beside a log that holds what it has lost by being shortened."""
    return path.with_name(f"{path.name}.1")


def _shortened_ns(path: Path) -> int:
    """When the log was shortened last: the time of the file beside it."""
    try:
        return older(path).stat().st_mtime_ns
    except FileNotFoundError:
        return NEVER


def _piece(path: Path, offset: int) -> bytes:
    """At most PIECE_BYTES; fewer at the end. Raises OSError."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(PIECE_BYTES)


def _whole_lines(data: bytes) -> bytes:
    """A full piece without the end of a line is passed on as it is."""
    return data[: data.rfind(b"\n") + 1] or (data if len(data) == PIECE_BYTES else b"")


def _end_of(path: Path, num_bytes: int) -> tuple[bytes, int]:
    """The last bytes of a file, and its size. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
        return file.read(), file.tell()
