"""A clock that jumps: clock.c adds to the time of day what a file says."""

import sys
from pathlib import Path

from tests.chaos.machine.preload import compiled

OFFSET_BYTES = 8


class Clock:
    """The clock of one process and of those that it starts."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file, self._library = folder / f"{name}.clock", compiled("clock", folder)
        self._file.write_bytes(bytes(OFFSET_BYTES))

    @property
    def variables(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "BATON_CLOCK_FILE": str(self._file)}

    def set(self, offset_s: int) -> None:
        """Writes in place, because processes have mapped the file."""
        with self._file.open("r+b", buffering=0) as file:
            file.write(offset_s.to_bytes(OFFSET_BYTES, sys.byteorder, signed=True))
