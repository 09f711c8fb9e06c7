"""A process's log: read while it is being written, and kept short."""

import contextlib
import os
import shutil
from pathlib import Path

TAIL_BYTES = 1024 * 1024  # at the end of the log, where its last lines are looked for
PIECE_BYTES = 1024 * 1024
LONG_BYTES = 8 * 1024 * 1024


def log_tail(path: Path, lines: int) -> tuple[str, int]:
    """The last lines of the log, and the offset behind them. Raises OSError."""
    data, end = _end_of(path, TAIL_BYTES)
    if len(data) < TAIL_BYTES:
        with contextlib.suppress(FileNotFoundError):
            data = _end_of(older(path), TAIL_BYTES - len(data))[0] + data
    last = data.splitlines(keepends=True)[-lines:] if lines else []
    return b"".join(last).decode(errors="replace"), end


def log_since(path: Path, offset: int) -> tuple[str, int]:
    """About PIECE_BYTES of what was written behind `offset`, in whole lines, and the offset behind them. Raises
    OSError."""
    before = b""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) < offset:  # the log was shortened meanwhile
            with contextlib.suppress(FileNotFoundError), older(path).open("rb") as shortened:
                shortened.seek(offset)
                before = shortened.read()
            offset = 0
        file.seek(offset)
        data = file.read(PIECE_BYTES)
    whole = data[: data.rfind(b"\n") + 1] if len(data) < PIECE_BYTES else data
    return (before + whole).decode(errors="replace"), offset + len(whole)


def shorten(path: Path) -> None:
    """Moves what a long log holds into the file beside it, whose former content goes. A line that is written at that
    moment may be lost. Invariant: who writes the log appends to it. Raises OSError."""
    if path.stat().st_size > LONG_BYTES:
        shutil.copyfile(path, older(path))
        os.truncate(path, 0)


def older(path: Path) -> Path:
    """The file beside a log that holds what it has lost by being shortened."""
    return path.with_name(f"{path.name}.1")


def _end_of(path: Path, num_bytes: int) -> tuple[bytes, int]:
    """The last bytes of a file, and its size. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
        return file.read(), file.tell()
