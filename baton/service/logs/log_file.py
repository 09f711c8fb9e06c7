"""A process's log: read while it is being written, and kept short."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import NamedTuple

TAIL_BYTES = 1024 * 1024  # at the end of the log, where its last lines are looked for
PIECE_BYTES = 1024 * 1024
LONG_BYTES = 8 * 1024 * 1024  # of a log that goes with its run
KEPT_BYTES = 64 * 1024 * 1024  # of a log that stays when its service has ended

SECOND_NS = 1_000_000_000
GOING_ON_NS = SECOND_NS // 2
LEFT_OUT = "(lines are left out here: the log was shortened before they were read)\n"


class Position(NamedTuple):
    """How far a log has been read, and how often it had been shortened then. A log that was shortened since goes on in
    the file beside it."""

    offset: int = 0
    shortened: int = 0


def log_tail(path: Path, lines: int) -> tuple[str, Position]:
    """The last lines of the log, and the position behind them. Raises OSError."""
    shortened, going_on = before = _shortened(path)
    if going_on:
        data, end = _end_of(older(path), TAIL_BYTES)
        position = Position(end, shortened - 1)
    else:
        data, end = _end_of(path, TAIL_BYTES)
        position = Position(end, shortened)
        if len(data) < TAIL_BYTES:
            with contextlib.suppress(FileNotFoundError):
                data = _end_of(older(path), TAIL_BYTES - len(data))[0] + data
    if _shortened(path) != before:
        return log_tail(path, lines)
    last = data.splitlines(keepends=True)[-lines:] if lines else []
    return b"".join(last).decode(errors="replace"), position


def log_since(path: Path, position: Position) -> tuple[str, Position]:
    """About PIECE_BYTES of what was written behind `position`, in whole lines, and the position behind them. Lines
    that were lost meanwhile are replaced by LEFT_OUT. Raises OSError."""
    offset, known = position
    shortened, going_on = before = _shortened(path)
    if known < shortened - 1:
        text, position = log_since(path, Position(0, shortened - 1))
        return LEFT_OUT + text, position
    is_older = known < shortened
    source = older(path) if is_older else path
    if not is_older and source.stat().st_size < offset:  # a line may lie behind what became the older one: it is lost
        offset = 0  # somebody else has emptied it
    data = _piece(source, offset)
    if _shortened(path) != before:
        return log_since(path, position)
    if is_older and not going_on and len(data) < PIECE_BYTES:
        text, position = log_since(path, Position(0, shortened))
        return data.decode(errors="replace") + text, position
    whole = _whole_lines(data)
    return whole.decode(errors="replace"), Position(offset + len(whole), known)


def shorten(path: Path, long_bytes: int = LONG_BYTES) -> None:
    """Moves what a long log holds into the file beside it, whose former content goes. A line that is written at that
    moment may be lost. Invariant: who writes the log appends to it. Raises OSError."""
    if path.stat().st_size > long_bytes:
        copy, times = path.with_name(f"{path.name}.new"), _shortened(path)[0] + 1
        shutil.copyfile(path, copy)
        _tell_shortened(copy, times, GOING_ON_NS)
        copy.replace(older(path))
        os.truncate(path, 0)
        _tell_shortened(older(path), times)


def older(path: Path) -> Path:
    """The file beside a log that holds what it has lost by being shortened."""
    return path.with_name(f"{path.name}.1")


def _shortened(path: Path) -> tuple[int, bool]:
    """How often the log was shortened, and whether the last time still goes on. The file beside it tells both by its
    time: the seconds since 1970, and GOING_ON_NS beyond them."""
    try:
        times, beyond_ns = divmod(older(path).stat().st_mtime_ns, SECOND_NS)
    except FileNotFoundError:
        return 0, False
    return times, beyond_ns == GOING_ON_NS


def _tell_shortened(beside: Path, times: int, beyond_ns: int = 0) -> None:
    time_ns = times * SECOND_NS + beyond_ns
    os.utime(beside, ns=(time_ns, time_ns))


def _piece(path: Path, offset: int) -> bytes:
    """Reads at most PIECE_BYTES; fewer at the end. Raises OSError."""
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
