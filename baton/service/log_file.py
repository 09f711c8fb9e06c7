"""A process's log, read while it is being written."""

from pathlib import Path

TAIL_BYTES = 1024 * 1024  # of the end, in which its last lines are looked for
PIECE_BYTES = 1024 * 1024


def log_tail(path: Path, lines: int) -> tuple[str, int]:
    """Its last lines, and the offset behind them. Raises OSError."""
    with path.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(max(0, end - TAIL_BYTES))
        last = file.read().splitlines(keepends=True)[-lines:] if lines else []
        return b"".join(last).decode(errors="replace"), file.tell() if lines else end


def log_since(path: Path, offset: int) -> tuple[str, int]:
    """What was written behind `offset`, a piece of it if it is long, and the offset behind that. Raises OSError."""
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(PIECE_BYTES)
        return data.decode(errors="replace"), offset + len(data)
