"""The logs of all processes of a service as one, in the order of time."""

import re
from collections.abc import Iterator
from datetime import datetime, time, timedelta
from pathlib import Path

from baton.service.log_file import PIECE_BYTES, log_tail

SUFFIX = ".log"
SLACK = timedelta(seconds=1)  # by which a file's own time may lag behind its last line's
# As our console form, the NATS server and our JSON form begin a line, or end it.
_TIME = re.compile(r'^(?:\[\d+\] [\d/]+ )?(\d\d:\d\d:\d\d\.\d+) |"timestamp": ?"([^"]+)"')


class MergedLogs:
    """What the files of a folder hold. A line without a time, as those of a traceback, stays behind the one before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def tail(self, lines: int) -> list[str]:
        """The last lines of all, in order. Raises OSError."""
        found = []
        for path in self._files():
            text, self._offsets[path] = log_tail(path, lines)
            found += _entries(text, datetime.fromtimestamp(path.stat().st_mtime))
        merged = "".join(text for _, text in sorted(found, key=lambda entry: entry[0])).splitlines(keepends=True)
        return merged[-lines:] if lines else []

    def news(self) -> Iterator[str]:
        """What was written since, in order; lines that are still being written come with the next call. Raises
        OSError."""
        found = []
        for path in self._files():
            with path.open("rb") as file:
                file.seek(self._offsets.setdefault(path, 0))
                data = file.read(PIECE_BYTES)
            whole = data[: data.rfind(b"\n") + 1] if len(data) < PIECE_BYTES else data
            self._offsets[path] += len(whole)
            found += _entries(whole.decode(errors="replace"), datetime.now())
        return (text for _, text in sorted(found, key=lambda entry: entry[0]))

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{SUFFIX}"))


def _entries(text: str, written: datetime) -> list[tuple[datetime, str]]:
    """(time, lines) in the order of `text`, whose last line was written at `written`: most lines tell no date."""
    entries: list[tuple[datetime | time | None, str]] = []
    for line in text.splitlines(keepends=True):
        shown = _shown_time(line)
        if shown is None and entries:
            shown, before = entries.pop()
            line = before + line
        entries.append((shown, line))
    dated, now = [], written
    for shown, lines in reversed(entries):
        now = now if shown is None else _dated(shown, now)
        dated.append((now, lines))
    return dated[::-1]


def _shown_time(line: str) -> datetime | time | None:
    """What a clock here showed at the line; None also where the line only resembles one of ours."""
    if (found := _TIME.search(line)) is None:
        return None
    try:
        if found[1]:
            return datetime.strptime(found[1], "%H:%M:%S.%f").time()
        return datetime.fromisoformat(found[2]).astimezone().replace(tzinfo=None)
    except (ValueError, OverflowError):
        return None


def _dated(shown: datetime | time, before: datetime) -> datetime:
    """The last moment until `before` at which a clock here showed `shown`, unless it has a date of its own."""
    if isinstance(shown, datetime):
        return shown
    moment = datetime.combine(before.date(), shown)
    return moment if moment <= before + SLACK else moment - timedelta(days=1)
