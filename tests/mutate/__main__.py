"""Mutation tests of the pure modules, with mutmut, in a copy of the sources.

    python -m tests.mutate [MODULE ...] [--children 2] [--json FILE]

MODULE is the beginning of a path, such as router/placement. A mutant is killed when one of the module's own tests
fails. A mutant that changes nothing but the words of a message is not counted. Survivors that FILE does not list yet
are shown, and scores and survivors written there. Exit code 1 when a module is below the goal.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.machine import describe, write_result
from tests.mutate.diffs import changed_lines, only_words
from tests.mutate.modules import PURE, judges_of
from tests.mutate.undecorated import undecorated

MEMORY_BYTES = 6 << 30  # that each process may take
GOAL = 0.85
PATIENCE = 5.0  # a mutant that runs for five times what its tests take is killed
KILLED = ("killed", "timeout", "segfault", "suspicious")
REPORT = """
import json
from mutmut.__main__ import collect_source_file_mutation_data
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code

mutants, _ = collect_source_file_mutation_data(mutant_names=())
print(json.dumps([
    {"status": status_by_exit_code[code], "diff": get_diff_for_mutant(name, path=data.path)}
    for data, name, code in mutants
]))
"""
ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "mutation.json"


@dataclass(frozen=True)
class Score:
    module: str
    mutants: int  # without those that change only words
    killed: int
    survivors: list[str]  # `line -> changed line`

    @property
    def share(self) -> float:
        return self.killed / self.mutants if self.mutants else 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="beginnings of paths; default all pure modules")
    parser.add_argument("--children", type=int, default=os.cpu_count() or 1, help="processes that test at a time")
    parser.add_argument("--json", type=Path, default=RESULT, help="of the scores and survivors; default %(default)s")
    arguments = parser.parse_args()
    chosen = [module for module in PURE if not arguments.modules or module.startswith(tuple(arguments.modules))]
    if not chosen:
        parser.error(f"no pure module begins like that; they are: {', '.join(PURE)}")
    scores = [judge(module, arguments.children) for module in track(chosen, "mutating", console=Console(stderr=True))]
    last = json.loads(arguments.json.read_text())["modules"] if arguments.json.exists() else []
    known = {score["module"]: score for score in last if score["module"] in PURE}
    show(scores, {module: score["survivors"] for module, score in known.items()})
    rows = known | {score.module: {**asdict(score), "commit": describe()["commit"]} for score in scores}
    write_result(arguments.json, {**describe(), "goal": GOAL, "modules": [rows[module] for module in sorted(rows)]})
    return int(any(score.share < GOAL for score in scores))


def judge(module: str, children: int) -> Score:
    """Mutates one module in a copy of the sources, and runs its own tests for each mutant."""
    with tempfile.TemporaryDirectory(prefix="baton-mutate-") as name:
        copy = Path(name)
        copy_sources(copy)
        (copy / module).write_text(undecorated((copy / module).read_text(encoding="utf-8")), encoding="utf-8")
        configure(copy, module, judges_of(module))
        python(copy, "-m", "mutmut", "run", "--max-children", str(children))
        survivors: list[str] = []
        mutants = killed = 0
        for mutant in json.loads(python(copy, "-c", REPORT)):
            before, after = changed_lines(mutant["diff"])
            if only_words(before, after):
                continue
            mutants += 1
            if mutant["status"] in KILLED:
                killed += 1
            else:
                survivors.append(f"{before} -> {after}")
        return Score(module, mutants, killed, survivors)


def copy_sources(copy: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for path in filter(None, listed.stdout.split("\0")):
        if (ROOT / path).is_file():
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, copy / path)


def configure(copy: Path, module: str, tests: list[str]) -> None:
    top = module.split("/")[0]
    arguments = ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tests.mutate.quick_first", "-W", "ignore"]
    others = sorted(path.name for path in copy.iterdir() if path.name not in (top, "tests", "pyproject.toml"))
    with (copy / "pyproject.toml").open("a") as file:
        file.write(
            f"\n[tool.mutmut]\nsource_paths = {json.dumps([top])}\nonly_mutate = {json.dumps([module])}\n"
            f"also_copy = {json.dumps(others)}\nuse_git_change_detection = false\ntimeout_multiplier = {PATIENCE}\n"
            f"pytest_add_cli_args = {json.dumps(arguments)}\n"
            f"pytest_add_cli_args_test_selection = {json.dumps(tests)}\n"
        )


def python(copy: Path, *arguments: str) -> str:
    """What a Python process in the copy prints. Raises SystemExit with its output when it fails."""
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }  # the copy, not the sources
    run = subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        env=environment,
        preexec_fn=limit_memory,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{run.stdout[-4000:]}{run.stderr[-4000:]}")
    return run.stdout


def limit_memory() -> None:
    """A mutant that asks for ever more memory gets a MemoryError, and the machine goes on."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))


def show(scores: list[Score], known: dict[str, list[str]]) -> None:
    """`known`: the survivors of the last run, by module."""
    table = Table("module", "mutants", "killed", "share", f">= {GOAL:.0%}")
    console = Console()
    for score in scores:
        met = "met" if score.share >= GOAL else "missed"
        table.add_row(score.module, str(score.mutants), str(score.killed), f"{score.share:.0%}", met)
        for survivor in score.survivors:
            if survivor not in known.get(score.module, ()):
                console.print(f"{score.module}: {survivor}", markup=False, highlight=False)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
