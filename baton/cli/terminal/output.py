"""Tables and lines for people."""

import sys

from rich.console import Console

PIPED_WIDTH = 200  # columns when stdout is no terminal: a table in a file is cut nowhere


def console() -> Console:
    """A console on the sys.stdout of the moment, which tests replace."""
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def human_bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
