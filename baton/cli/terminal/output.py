"""Tables and lines for people."""

import os
import sys
import textwrap

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

PIPED_WIDTH = 200  # columns when stdout is no terminal and COLUMNS is not set


def console() -> Console:
    """A console on the sys.stdout of the moment, which tests replace."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(file=sys.stdout, highlight=False, width=None if known else PIPED_WIDTH)


def print_table(out: Console, table: Table) -> None:
    """Cuts no cell. In a narrow terminal columns are as wide as their longest word; where even that is too much, each
    row becomes lines: its first cell, then the headings and values of the others."""
    columns = [[Measurement.get(out, out.options, cell) for cell in (c.header, *c.cells)] for c in table.columns]
    most = [max(cell.maximum for cell in column) for column in columns]
    if sum(most) + 3 * len(most) + 1 > out.width:
        table.box, table.padding, table.pad_edge = None, (0, 2, 0, 0), False
        least = [max(cell.minimum for cell in column) for column in columns]
        spare = out.width - sum(least) - 2 * (len(least) - 1)
        if spare < 0:
            return _print_rows(out, table)
        for column, low, high in zip(table.columns, least, most, strict=True):
            column.width, column.overflow = min(high, low + spare), "fold"
            spare -= column.width - low
    return out.print(table)


def _print_rows(out: Console, table: Table) -> None:
    def plain(cell: object) -> str:
        return Text.from_markup(cell).plain if isinstance(cell, str) else str(cell)

    if table.title:
        out.print(table.title)
    headings = [plain(column.header).replace(" ", "\xa0") for column in table.columns[1:]]
    for (first, *cells), row in zip(zip(*(c.cells for c in table.columns), strict=True), table.rows, strict=True):
        pairs = [f"{name}\xa0{cell}".strip() for name, cell in zip(headings, map(plain, cells), strict=True) if cell]
        lines = textwrap.fill("; ".join(pairs), out.width, initial_indent="  ", subsequent_indent="  ")
        out.print(Text(f"{plain(first)}\n{lines}".replace("\xa0", " "), style=row.style or ""))


def counted(number: int, noun: str) -> str:
    """'1 worker', '2 workers', '3 batches'."""
    ending = "" if number == 1 else "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number} {noun}{ending}"


def rounded(value: float) -> str:
    """'0.033', '8.4', '12.5', '1,235': what people read of a measured value."""
    if abs(value) < 10:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}".removesuffix(".0")


def human_bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
