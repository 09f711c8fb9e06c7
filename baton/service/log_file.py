"""A process's log, read while it is being written."""

from pathlib import Path

TAIL_BYTES = 1024 * 1024  # at the end of the file, where its last lines are looked for
PIECE_BYTES = 1024 * 1024


def log_tail(path: Path, lines: int) -> tuple[str, int]:
    """The last lines of the file, and the offset behind them. Raises OSError."""
    with path.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - TAIL_BYTES))
        last = file.read().splitlines(keepends=True)[-lines:] if lines else []
        return b"".join(last).decode(errors="replace"), file.tell() if lines else end


def log_since(path: Path, offset: int) -> tuple[str, int]:
    """At most PIECE_BYTES of what was written behind `offset`, and the offset behind them. Raises OSError."""
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(PIECE_BYTES)
        return data.decode(errors="replace"), offset + len(data)
