"""The result for people and for programs, with the machine and the versions on which it was measured."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.routing.comparison import Row
from benchmarks.routing.half import ROOT

NUMBERS = ("Baton", "Dynamo", "ratio")
BUSY_LOAD = 0.5  # with more running processes beside ours, the figures are not to be trusted


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name", platform.processor())
    cpu = f"{name} (family {fields.get('cpu family')}, model {fields.get('model')})"
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """The working tree's commit, with a plus when the tree has changes."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True)
        changes = subprocess.run([*git, "status", "--porcelain"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changes.stdout else "")


def print_table(console: Console, title: str, rows: list[Row]) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("case", "what", "unit", "Baton", "Dynamo", "ratio", "goal", ""):
        table.add_column(column, justify="right" if column in NUMBERS else "left", no_wrap=column in NUMBERS)
    case = ""
    for row in rows:
        verdict = {True: "[green]met[/]", False: "[bold red]missed[/]", None: ""}[row.met]
        theirs = "" if row.theirs is None else f"{row.theirs:,.1f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
        shown = row.case if row.case != case else ""
        case = row.case
        table.add_row(shown, row.what, row.unit, f"{row.ours:,.1f}", theirs, ratio, str(row.goal or ""), verdict)
    console.print(table)


def write_json(path: Path, rows: list[Row], versions: dict[str, dict[str, str]], began: dict[str, Any]) -> None:
    results = {"versions": versions, "rows": [msgspec.to_builtins(row) | {"met": row.met} for row in rows]}
    write_results(path, "router_vs_dynamo", began, results)


def write_results(path: Path, benchmark: str, began: dict[str, Any], results: dict[str, Any]) -> None:
    """Writes the results of a run below the facts that identify it. `began`: the machine's state at the start."""
    document = {
        "benchmark": benchmark,
        "command": " ".join(["python", "-m", f"benchmarks.{benchmark}", *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": began,
        "commit": commit(),
        **results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
