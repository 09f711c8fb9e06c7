"""CPU seconds that a process spends on imports before it can listen, each measured as a child process of its own.

    python -m benchmarks.import_cost [--runs 7] [--top 25]

`--top` also lists the modules of each process that take longest by themselves (python -X importtime: wall time).
Modules are compiled once before, as they are on every machine that has run Baton. The router's compiled loops have a
row of their own, because the router loads them in a thread beside the model's files. `import torch alone` is the floor
of a worker with the torch engine.
"""

import argparse
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    code: str
    goal_s: float | None = None


OWN_WORKER = "import decode_worker.__main__, prefill_worker.__main__"
CASES = (
    Case("python alone", "pass"),
    Case("router", "import router.__main__", goal_s=1.2),
    Case("router, its compiled loops loaded", "import router.__main__, runtime.compiled as c; c.load_compiled()"),
    Case("worker with the mock engine", OWN_WORKER, goal_s=1.5),
    Case("worker with the torch engine", f"{OWN_WORKER}, engine.loading.loaded_model"),
    Case("import torch alone", "import torch"),
    Case("baton up", "import baton.cli.up"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU seconds of imports before a process can listen.")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--top", type=int, default=0, help="modules of each process to list")
    arguments = parser.parse_args()
    table = Table("process", "min, CPU s", "median", "goal")
    for case in CASES:
        cpu_s(case.code)
        samples = [cpu_s(case.code) for _ in range(arguments.runs)]
        goal = "" if case.goal_s is None else f"<= {case.goal_s}"
        table.add_row(case.name, f"{min(samples):.2f}", f"{statistics.median(samples):.2f}", goal)
    console = Console()
    console.print(table)
    for case in CASES if arguments.top else ():
        console.print(f"\n{case.name}: ms of each module by itself", style="bold")
        for ms, module in slowest_modules(case.code)[: arguments.top]:
            console.print(f"{ms:8.1f} {module}", highlight=False)


def cpu_s(code: str) -> float:
    """User and system seconds of a fresh interpreter that runs `code`."""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, env=environment())
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"python -c {code!r} ended with {child.returncode}")
    return usage.ru_utime + usage.ru_stime


def slowest_modules(code: str) -> list[tuple[float, str]]:
    command = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    lines = [line.removeprefix("import time:").split("|") for line in done.stderr.splitlines() if "|" in line]
    return sorted(((int(own) / 1000, name.strip()) for own, _, name in lines[1:]), reverse=True)


def environment() -> dict[str, str]:
    """Ours, but that modules are compiled once and not in each process."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


if __name__ == "__main__":
    main()
