"""`baton logs` of a folder, as somebody at a terminal reads it."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.app import app

TIMEOUT_S = 60


@contextmanager
def following(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`baton logs --follow`, which ends by Ctrl-C."""
    command = [sys.executable, "-m", "baton", "logs", *arguments, "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as reader:
        try:
            yield reader
            reader.send_signal(signal.SIGINT)
            _, said = reader.communicate(timeout=TIMEOUT_S)
            assert (reader.returncode, said) == (130, "")
        finally:
            reader.kill()


def line_of(reader: subprocess.Popen[str]) -> str:
    assert reader.stdout is not None
    return reader.stdout.readline()


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


@pytest.mark.timeout(120)
def test_all_logs_are_followed_into_files_that_come_later(tmp_path: Path) -> None:
    (tmp_path / "router-1.log").write_text("10:00:01.5 second\n")
    (tmp_path / "decode-1.log").write_text("10:00:00.5 first\n")
    with following("--log-dir", str(tmp_path)) as reader:
        assert [line_of(reader), line_of(reader)] == ["10:00:00.5 first\n", "10:00:01.5 second\n"]
        append(tmp_path / "router-1.log", '10:00:02.5 third\n  body = {"timestamp": "soon"}\n')
        assert [line_of(reader), line_of(reader)] == ["10:00:02.5 third\n", '  body = {"timestamp": "soon"}\n']
        append(tmp_path / "decode-2.log", "10:00:03.5 fourth\n")
        assert line_of(reader) == "10:00:03.5 fourth\n"


@pytest.mark.timeout(120)
def test_one_log_is_followed_alone(tmp_path: Path) -> None:
    for name in ("router-1", "decode-1"):
        (tmp_path / f"{name}.log").write_text(f"{name} began\n")
    with following("decode-1", "--log-dir", str(tmp_path)) as reader:
        assert line_of(reader) == "decode-1 began\n"
        append(tmp_path / "router-1.log", "not asked for\n")
        append(tmp_path / "decode-1.log", "decode-1 goes on\n")
        assert line_of(reader) == "decode-1 goes on\n"


@pytest.mark.parametrize("arguments", [[], ["--follow"]])
def test_a_folder_that_is_not_there_is_told(tmp_path: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["logs", "--log-dir", str(tmp_path / "elsewhere"), *arguments])
    assert (result.exit_code, result.output) == (3, "error: no process has a log there\n")
