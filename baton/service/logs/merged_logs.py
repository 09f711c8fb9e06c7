"""The logs of all processes of a service as one, in the order of time."""

import contextlib
import re
from collections.abc import Iterable, Iterator
from datetime import datetime, time, timedelta
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from baton.service.logs.log_file import Position, log_since, log_tail

SUFFIX = ".log"
YEARS = range(1970, 9999)  # beyond them moments cannot be reckoned with
SLACK = timedelta(seconds=1)  # by which a file's own time may lag behind its last line's
# As our console form, the NATS server and our JSON form begin a line, or end it.
_TIME = re.compile(r'^(?:\[\d+\] [\d/]+ )?(\d\d:\d\d:\d\d\.\d+) |"timestamp": ?"([^"]+)"')


class Entry(NamedTuple):
    """A line with a time and the lines without one behind it, as those of a traceback."""

    at_s: float  # since 1970, because nodes may be in several time zones
    process: str
    text: str


class MergedLogs:
    """What the files of a folder hold, or the file of one process."""

    def __init__(self, folder: Path, process: str | None = None) -> None:
        self._folder = folder
        self._process = process
        self._positions: dict[Path, Position] = {}

    @property
    def there(self) -> bool:
        """Whether the folder still exists; it goes with its run."""
        return self._folder.is_dir()

    def processes(self) -> list[str]:
        """The names of all processes that have a log there."""
        return [path.stem for path in self._folder.glob(f"*{SUFFIX}")]

    def tail(self, lines: int) -> list[Entry]:
        """The last lines of all, in order, and perhaps some more before them. Raises OSError."""
        found: list[Entry] = []
        for process, path in self._files():
            with contextlib.suppress(FileNotFoundError):  # it has gone since, or a link leads nowhere
                text, self._positions[path] = log_tail(path, lines)
                found += _entries(process, text, datetime.fromtimestamp(path.stat().st_mtime))
            found = in_order(found)[-lines:] if lines else []  # memory is bounded, however many files there are
        return found

    def news(self) -> list[Entry]:
        """What was written since, in order; lines that are still being written come with the next call. A file
        that cannot be read is left out."""
        found: list[Entry] = []
        for process, path in self._files():
            with contextlib.suppress(OSError):
                text, self._positions[path] = log_since(path, self._positions.get(path, Position()))
                found += _entries(process, text, datetime.now())
        return in_order(found)

    def _files(self) -> Iterator[tuple[str, Path]]:
        """A link is followed, because it may lead to another file later."""
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            if self._process in (None, path.stem):
                yield path.stem, path.resolve()


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=attrgetter("at_s"))


def _entries(process: str, text: str, written: datetime) -> list[Entry]:
    """Parses `text`, whose last line was written at `written`, because most lines tell no date. The order stays."""
    entries: list[tuple[datetime | time | None, list[str]]] = []
    for line in text.splitlines(keepends=True):
        shown = _shown_time(line)
        if shown is None and entries:
            entries[-1][1].append(line)
        else:
            entries.append((shown, [line]))
    dated, now = [], written
    for shown, lines in reversed(entries):
        now = now if shown is None else _dated(shown, now)
        dated.append(Entry(now.timestamp(), process, "".join(lines)))
    return dated[::-1]


def _shown_time(line: str) -> datetime | time | None:
    """What a clock here showed at the line; None also where the line only resembles one of ours."""
    if (found := _TIME.search(line)) is None:
        return None
    try:
        if found[1]:
            return datetime.strptime(found[1], "%H:%M:%S.%f").time()
        moment = datetime.fromisoformat(found[2]).astimezone().replace(tzinfo=None)
    except (ValueError, OverflowError):
        return None
    return moment if moment.year in YEARS else None


def _dated(shown: datetime | time, before: datetime) -> datetime:
    """The last moment until `before` at which a clock here showed `shown`, unless it has a date of its own."""
    if isinstance(shown, datetime):
        return shown
    moment = datetime.combine(before.date(), shown)
    return moment if moment <= before + SLACK else moment - timedelta(days=1)
