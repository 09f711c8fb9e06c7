"""Log lines that strangers can cause at will: so many of a kind are written, and the others are counted."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

PERIOD_S: Final = 60.0
MAX_KINDS: Final = 1024  # remembered; the one that was least lately written is forgotten


class Sparing:
    """Writes `lines` of a kind per PERIOD_S; the first line afterwards says how many were left out."""

    def __init__(self, lines: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._lines = lines
        self._clock = clock
        self._kinds: OrderedDict[object, list[float]] = OrderedDict()  # kind -> [end of its period, seen in it]

    def __call__(self, write: Callable[..., object], event: str, kind: object = "", **fields: Any) -> None:
        """`kind`: beside the event, what has lines of its own, such as an address."""
        if (unsaid := self.take((event, kind))) is not None:
            write(event, **fields, **({"lines_left_out": unsaid} if unsaid else {}))

    def take(self, kind: object) -> int | None:
        """How many lines of this kind were left out before this one; None: this one is left out as well."""
        now_s, known = self._clock(), self._kinds.get(kind)
        left_out = 0
        if known is None or now_s >= known[0]:
            left_out = 0 if known is None else max(0, int(known[1]) - self._lines)
            known = self._kinds[kind] = [now_s + PERIOD_S, 0]
            self._kinds.move_to_end(kind)
            if len(self._kinds) > MAX_KINDS:
                self._kinds.popitem(last=False)
        known[1] += 1
        return left_out if known[1] <= self._lines else None


class SparingFilter(logging.Filter):
    """Bounds what libraries that speak with strangers write through the standard library's logging."""

    def __init__(self, lines: int, libraries: Sequence[str]) -> None:
        super().__init__()
        self._spare = Sparing(lines)
        self._libraries = tuple(libraries)

    def filter(self, record: logging.LogRecord) -> bool:
        spared = record.name.startswith(self._libraries)
        return not spared or self._spare.take((record.name, record.levelno)) is not None
