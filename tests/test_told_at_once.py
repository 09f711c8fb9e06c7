import subprocess
import sys
from pathlib import Path

import pytest

ENDED_EARLY = """
import os

def test_that_fails():
    assert 1 + 1 == 3, "the reason"

def test_that_ends_the_run():
    os._exit(9)
"""


@pytest.mark.parametrize("processes", ["0", "1"])
def test_a_run_that_is_ended_has_told_what_failed(tmp_path: Path, processes: str) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(ENDED_EARLY)
    options = ["-p", "tests.told_at_once", "-p", "no:cacheprovider", "-c", str(tmp_path / "none.ini"), "-n", processes]
    command = [sys.executable, "-m", "pytest", *options, "--max-worker-restart", "0", str(file)]
    (tmp_path / "none.ini").touch()
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    before = told.partition("= FAILURES =")[0]
    assert "FAILED" in before, told
    assert "test_that_fails (call, after" in before
    assert "AssertionError: the reason" in before
