"""A machine that lets nobody write, or start a process: one sentence says so, before anything starts."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cli.terminal.exit_codes import ExitCode
from runtime.processes.available_threads import PIDS

pytestmark = pytest.mark.slow

UP = [sys.executable, "-m", "baton", "up", "--model", "mock", "--http-port", "0", "--set", "router.grpc_port=0"]
READ_ONLY = """
for folder in $(cut -d ' ' -f 2 /proc/mounts); do
    case $folder in /proc*|/sys*) ;; *) mount -o remount,ro,bind $folder 2> /dev/null;; esac
done
touch /tmp/$$ 2> /dev/null && exit 99
exec "$@"
"""


def said(command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


def test_where_nothing_can_be_written_up_asks_for_a_folder() -> None:
    unshare = [shutil.which("unshare") or "false", "--mount", "sh", "-c", READ_ONLY, "sh"]
    if said([*unshare, "true"]).returncode:
        pytest.skip("no file system can be made read-only here")
    done = said([*unshare, *UP])
    assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
    assert done.stderr.endswith("error: TMPDIR: there is no folder here that we may write to: name one\n")
    assert "Traceback" not in done.stderr


@pytest.fixture
def few() -> Iterator[Path]:
    """A control group that may have a few threads."""
    group = PIDS / f"baton-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no pids controller (cgroup v1) that we may write to")
    yield group
    group.rmdir()


def test_where_few_threads_may_be_started_up_says_how_many_it_takes(few: Path) -> None:
    (few / "pids.max").write_text("30")
    done = said(["sh", "-c", f'echo $$ > {few}/cgroup.procs; exec "$@"', "sh", *UP])
    assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
    assert "Traceback" not in done.stderr
    assert "more threads and processes may be started here, and this service has 50 or more: let it" in done.stderr
