"""A clock that jumps: libfaketime in front of the C library, told by a file what to add to the time of day."""

import glob
from pathlib import Path


def find_library() -> str:
    """Empty when libfaketime is not installed."""
    return next(iter(glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1")), "")


def why_no_clocks() -> str:
    return "" if find_library() else "libfaketime is not installed (Debian: libfaketime)"


def clock_variables(file: Path) -> dict[str, str]:
    """The monotonic clock goes on as it is, as it does when a real machine's time of day is set."""
    return {
        "LD_PRELOAD": find_library(),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DISABLE_SHM": "1",  # its semaphore let processes that start together wait for minutes
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
