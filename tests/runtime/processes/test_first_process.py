"""`baton` as PID 1, as in a container without an init of its own."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

NEW_NAMESPACE = [shutil.which("unshare") or "false", "--pid", "--fork", "--mount-proc", "--kill-child"]
SERVING = "{model: mock, router: {http_port: 0, grpc_port: 0}}"
PROGRAM = """
import os, signal, sys
from runtime.processes.first_process import run_in_child

if os.getpid() == 1:
    raise SystemExit(run_in_child())
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
for _ in range(3):
    if not os.fork():
        os.fork()  # the second one is an orphan
        os._exit(0)
    os.wait()
print("ready", flush=True)
signal.pause()
"""


@contextmanager
def first_process(*arguments: str) -> Iterator[tuple["subprocess.Popen[str]", psutil.Process]]:
    """What runs `unshare`, and the process that is PID 1 inside."""
    if subprocess.run([*NEW_NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("no namespace of processes can be made here")
    command = [*NEW_NAMESPACE, sys.executable, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as outside:
        assert outside.stdout is not None
        first = outside.stdout.readline()
        try:
            assert first
            yield outside, psutil.Process(outside.pid).children()[0]
        finally:
            outside.kill()


def test_orphans_are_collected_and_signals_and_the_exit_code_passed_on() -> None:
    with first_process("-c", PROGRAM) as (outside, first):
        deadline_s = time.monotonic() + 30
        while len(first.children()) > 1 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        (child,) = first.children()
        assert child.status() != psutil.STATUS_ZOMBIE
        first.terminate()
        assert outside.wait(30) == 7


@pytest.mark.slow
def test_a_service_drains_on_sigterm(tmp_path: Path) -> None:
    (tmp_path / "serving.yaml").write_text(SERVING)
    with first_process("-m", "baton", "up", "--json", "--config", str(tmp_path / "serving.yaml")) as (outside, first):
        assert outside.stdout is not None
        assert any(json.loads(line)["event"] == "serving" for line in outside.stdout)
        first.terminate()
        assert [json.loads(line)["event"] for line in outside.stdout] == ["draining", "stopped"]
        assert outside.wait(30) == 0
