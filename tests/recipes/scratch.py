"""A copy of the sources in which a test follows a recipe of docs/how-to.md, and what the recipe says it touches."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("baton", "decode_worker", "engine", "kvtransfer", "planner", "prefill_worker", "proto", "router", "runtime")
NAME = "toy"  # stands where a recipe says NAME
GENERATED = "proto/baton_proto/generated/"  # what `make proto` writes; no hand touches it


class Scratch:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._touched: set[str] = set()
        for name in (*SOURCES, "simulator", "worker"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "serving.yaml", folder)

    def write(self, path: str, text: str) -> None:
        """Makes a new file."""
        assert not (self.folder / path).exists(), f"{path} is there already"
        (self.folder / path).write_text(text)
        self._touched.add(path)

    def rewrite(self, path: str, text: str) -> None:
        """Puts another text into a file that is there."""
        assert (self.folder / path).exists(), f"{path} is not there: the recipe has rotted"
        (self.folder / path).write_text(text)
        self._touched.add(path)

    def edit(self, path: str, old: str, new: str) -> None:
        """Puts `new` where `old` is, which must be there once."""
        text = (self.folder / path).read_text()
        assert text.count(old) == 1, f"{path} has {text.count(old)} times {old!r}: the recipe has rotted"
        (self.folder / path).write_text(text.replace(old, new))
        self._touched.add(path)

    def run(self, *arguments: str, fails: bool = False) -> str:
        """Runs Python in the copy; returns what it printed."""
        environment = os.environ | {"PYTHONPATH": f"{self.folder}{os.pathsep}{self.folder / 'proto'}"}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=110,
        )
        assert fails == bool(done.returncode), done.stdout
        return done.stdout

    def has_followed(self, recipe: str) -> None:
        """Asserts that what was touched is what the recipe of this heading names."""
        assert self._touched == {path.replace("NAME", NAME) for path in files_of(recipe)}


def files_of(recipe: str) -> list[str]:
    """The files that a recipe names in its line `Files: ...`."""
    text = (ROOT / "docs" / "how-to.md").read_text()
    section = re.search(rf"^## {re.escape(recipe)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert section, f"docs/how-to.md has no recipe {recipe!r}"
    line = re.search(r"^Files: (.*?)\n\n", section[1], re.M | re.S)
    assert line, f"the recipe {recipe!r} has no line of files"
    return re.findall(r"`([^`]+)`", line[1])
