"""What the commands for a Ray cluster say where there is none. With one: tests/baton/on_ray/."""

import subprocess
import sys
from pathlib import Path

import pytest

from baton.cli.terminal.service import meant_run
from baton.runs.run_file import OwnRun
from runtime.security.keys import NO_KEYS

pytestmark = pytest.mark.slow

NOWHERE = "127.0.0.1:1"
WITHOUT_RAY = "import sys; sys.modules['ray'] = None; "


def run(*arguments: str, before: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", f"{before}from baton.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


@pytest.mark.parametrize("command", [["up", "--ray", "--model", "mock"], ["down"], ["logs", "decode-1"]])
def test_where_ray_is_not_installed_they_say_how_to_get_it(command: list[str]) -> None:
    result = run(*command, "--address", NOWHERE, before=WITHOUT_RAY)
    assert (result.returncode, result.stderr) == (2, "error: ray: is not installed: pip install 'ray[default]'\n")


@pytest.mark.parametrize("command", [["down"], ["logs", "decode-1"], ["logs"]])
def test_where_nothing_runs_here_nor_on_ray_they_say_both(command: list[str]) -> None:
    result = run(*command, before=WITHOUT_RAY)
    assert result.returncode == 3
    assert result.stderr.startswith(
        "error: no service of yours runs on this machine, nor on Ray: ray: is not installed"
    )


@pytest.mark.parametrize("on_ray", [False, True])
def test_a_service_that_is_named_brings_its_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_ray: bool
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    own = OwnRun("night", NO_KEYS, on_ray, None)
    for name in (None, "night"):
        run, namespace = meant_run(name, "auto", "default")
        assert (run is None, namespace) == (on_ray, "night" if on_ray else "default")
    assert meant_run(None, "auto", "day")[1] == "day"
    assert meant_run(None, NOWHERE, "default") == (None, "default")
    own.close()


@pytest.mark.parametrize("command", [["up", "--ray", "--model", "mock"], ["down"], ["logs", "decode-1"]])
def test_where_no_cluster_listens_they_say_so_at_once(command: list[str]) -> None:
    result = run(*command, "--address", NOWHERE)
    assert result.returncode == 3
    assert f"no Ray cluster at '{NOWHERE}': " in result.stderr


def test_log_files_of_a_cluster_lie_on_its_nodes(tmp_path: Path) -> None:
    result = run("up", "--ray", "--model", "mock", "--log-dir", str(tmp_path))
    assert (result.returncode, result.stderr.startswith("error: --log-dir: is not for --ray")) == (2, True)


def test_without_ray_logs_are_read_from_their_folder(tmp_path: Path) -> None:
    (tmp_path / "decode-1.log").write_text("one\ntwo\n")
    result = run("logs", "decode-1", "--lines", "1", "--log-dir", str(tmp_path))
    assert (result.returncode, result.stdout) == (0, "two\n")
    result = run("logs", "decode-7", "--log-dir", str(tmp_path))
    assert (result.returncode, "no log of 'decode-7'; those that are there: decode-1" in result.stderr) == (3, True)
