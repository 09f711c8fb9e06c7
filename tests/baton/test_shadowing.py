"""A package that hides one of ours is named in one line, by the console script and by `python -m baton` alike."""

import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from baton.shadowing import PACKAGES, ROOT, refuse_shadowed

PATH = f"{ROOT}:{ROOT / 'proto'}"
MODULE = [sys.executable, "-m", "baton"]
SCRIPT = [sys.executable, "-P", "-c", "from baton.cli import main; main()"]  # as pip writes it: nothing of the folder


def make(folder: Path, place: str) -> Path:
    path = folder / place
    path.parent.mkdir(exist_ok=True)
    path.write_text("raise RuntimeError('was imported')")
    return path


def run(command: list[str], folder: Path, path: str) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize("place", ["engine.py", "engine/__init__.py", "runtime.py", "baton_proto/__init__.py"])
@pytest.mark.parametrize("by_path", [False, True], ids=["folder", "PYTHONPATH"])
def test_what_hides_a_package_is_named_with_the_remedy_and_the_code_is_2(
    tmp_path: Path, place: str, by_path: bool
) -> None:
    other = make(tmp_path, place)
    command, path = (SCRIPT, f"{tmp_path}:{PATH}") if by_path else (MODULE, PATH)
    ended = run([*command, "up", "--model", "mock"], tmp_path, path)
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"error: {other} hides Baton's own package {place.split('/')[0].removesuffix('.py')!r}; ")
    assert (ended.returncode, ended.stdout) == (2, "")


def test_a_command_that_does_not_need_the_hidden_package_runs(tmp_path: Path) -> None:
    make(tmp_path, "router.py")
    ended = run([*MODULE, "status", "--address", "127.0.0.1:9"], tmp_path, PATH)
    assert (ended.returncode, "hides" in ended.stderr) == (3, False)


def test_a_command_that_imports_the_hidden_package_itself_is_refused(tmp_path: Path) -> None:
    other = make(tmp_path, "engine.py")
    ended = run([*MODULE, "profile", "--model", "mock"], tmp_path, PATH)
    assert (ended.returncode, f"{other} hides" in ended.stderr) == (2, True)


def test_every_package_but_the_face_is_checked_and_that_takes_no_time() -> None:
    include = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.removesuffix("*") for name in include} == {"baton", *PACKAGES}
    begin_s = time.process_time()
    refuse_shadowed()
    assert time.process_time() - begin_s < 0.05  # 1 ms of this process's own time, however busy the machine is
