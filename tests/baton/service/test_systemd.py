"""A service under systemd: what it says on the socket that systemd listens on, and the unit."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

UNIT = Path(__file__).parents[3] / "deploy" / "baton.service"
BATON = [sys.executable, "-m", "baton", "up", "--model", "mock", "--prefill", "0", "--http-port", "0"]
WATCHDOG_S = 1.5
WAIT_S = 60.0


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(WAIT_S)
        yield listener


def test_it_says_that_it_serves_that_it_lives_while_its_router_answers_and_that_it_drains(
    listener: socket.socket,
) -> None:
    variables = {"NOTIFY_SOCKET": listener.getsockname(), "WATCHDOG_USEC": str(round(WATCHDOG_S * 1e6))}
    command = [*BATON, "--set", "router.grpc_port=0"]
    with subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.DEVNULL) as process:
        try:
            until(listener, "READY=1")
            children = psutil.Process(process.pid).children(recursive=True)
            assert all("NOTIFY_SOCKET" not in child.environ() for child in children)
            until(listener, "WATCHDOG=1")
            (router,) = [child for child in children if "router" in child.cmdline()]
            router.suspend()
            until_silent(listener, 3 * WATCHDOG_S)
            router.resume()
            until(listener, "WATCHDOG=1")
            process.send_signal(signal.SIGTERM)
            until(listener, "STOPPING=1")
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_its_unit_is_rated_ok() -> None:
    command = ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(UNIT)]
    rated = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert " OK " in rated.splitlines()[-1]


def until(listener: socket.socket, word: str) -> None:
    while word not in listener.recv(4096).decode().split("\n"):
        pass


def until_silent(listener: socket.socket, seconds: float) -> None:
    """Returns when nothing has come for so long."""
    listener.settimeout(seconds)
    ends_s = time.monotonic() + WAIT_S
    with contextlib.suppress(TimeoutError):
        while time.monotonic() < ends_s:
            listener.recv(4096)
        raise AssertionError("it says again and again that it lives")
    listener.settimeout(WAIT_S)
