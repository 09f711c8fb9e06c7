"""The figures of the load benchmark for people and for programs."""

import sys
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from benchmarks.routing.report import write_results

VERSIONS = ("grpcio", "httptools", "msgspec", "tokenizers", "uvicorn", "uvloop")
FIGURES = ("requests/s", "TTFT p50 ms", "p99", "whole p50", "router CPU ms")


class Round(Struct, frozen=True):
    """One run of one case on one service."""

    requests: int
    requests_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    total_p50_ms: float
    router_cpu_ms: float  # CPU per request
    events: float  # server-sent events per answer

    @property
    def figures(self) -> tuple[float, ...]:
        return (self.requests_per_s, self.ttft_p50_ms, self.ttft_p99_ms, self.total_p50_ms, self.router_cpu_ms)


class Row(Struct, frozen=True, omit_defaults=True):
    case: str
    best: Round
    rounds: list[Round]
    goals_met: bool | None  # None: the case has no goals
    dynamo: str  # Dynamo's figures that were measured elsewhere
    dynamo_best: Round | None = None  # measured here, in turns with ours
    dynamo_rounds: list[Round] = []


def best(rounds: list[Round]) -> Round:
    return min(rounds, key=lambda one: one.router_cpu_ms)


def print_table(console: Console, title: str, rows: list[Row]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("case", *FIGURES, "goals", "Dynamo"):
        table.add_column(column, justify="right" if column in FIGURES else "left", no_wrap=True)
    for row in rows:
        table.add_row(row.case, *_shown(row.best), _verdict(row), row.dynamo)
    console.print(table)


def print_comparison(console: Console, title: str, rows: list[Row]) -> None:
    """Three lines for each case: ours, Dynamo's, and ours as a share of Dynamo's."""
    table = Table(title=title, title_justify="left")
    for column in ("case", "", *FIGURES, "events", "goals"):
        table.add_column(column, justify="right" if column in (*FIGURES, "events") else "left", no_wrap=True)
    for row in rows:
        theirs = row.dynamo_best
        assert theirs is not None, "without a comparison there is none to print"
        ratios = (f"{mine / other:.2f}x" for mine, other in zip(row.best.figures, theirs.figures, strict=True))
        table.add_row(row.case, "Baton", *_shown(row.best), f"{row.best.events:.1f}", _verdict(row))
        table.add_row("", "Dynamo", *_shown(theirs), f"{theirs.events:.1f}")
        table.add_row("", "[bold]ratio[/]", *ratios, end_section=True)
    console.print(table)


def _shown(one: Round) -> Iterator[str]:
    rate, *milliseconds = one.figures
    yield f"{rate:,.0f}"
    yield from (f"{value:.2f}" for value in milliseconds)


def _verdict(row: Row) -> str:
    return {True: "[green]met[/]", False: "[bold red]missed[/]", None: ""}[row.goals_met]


def write_json(path: Path, rows: list[Row], began: dict[str, Any], dynamo: dict[str, Any] | None) -> None:
    """`dynamo`: the Dynamo that was measured beside ours; None: none was."""
    results: dict[str, Any] = {"versions": dict(_versions()), "rows": rows}
    if dynamo is not None:
        results["dynamo"] = dynamo
    write_results(path, "frontend_load", began, results)


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", sys.version.split()[0]
    for name in VERSIONS:
        yield name, version(name)
    if find_spec("fastokens"):
        yield "fastokens", version("fastokens")
