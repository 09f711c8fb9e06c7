"""A child that beats: one that hangs is killed, and one that has no core is not."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from baton.service.local import child_process
from baton.service.local.child_process import ChildProcess, environment
from tests.busy_core import busy_core
from tests.freezing import freeze

WAIT_S = 60.0
SILENT_S = 2.0
PROGRAM = """
import asyncio, os, signal, time
from runtime.processes.serving import beat, print_ready

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, compute)
    beating = asyncio.create_task(beat())
    await asyncio.sleep(0)
    print_ready("child", "child-1", {})
    await beating

def compute():
    if os.path.exists("for ever"):
        while True: pass
    until_s = time.process_time() + 0.15
    while time.process_time() < until_s: pass
    print("computed", flush=True)

asyncio.run(main())
"""


@pytest.fixture
async def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChildProcess:
    monkeypatch.setattr(child_process, "SILENT_S", SILENT_S)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beating_program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    child = ChildProcess("child-1", "beating_program", [], environment(1) | {"PYTHONPATH": path}, None)
    await child.start()
    await child.wait_ready(WAIT_S)
    return child


@pytest.mark.parametrize("how", ["stopped", "its loop never returns"])
async def test_a_child_that_hangs_is_killed(child: ChildProcess, tmp_path: Path, how: str) -> None:
    began_s = time.monotonic()
    if how == "stopped":
        freeze(child.pid)
    else:
        (tmp_path / "for ever").touch()
        child.send_signal(signal.SIGUSR1)
    ended = await asyncio.wait_for(child.wait(), WAIT_S)
    assert ended.returncode == -signal.SIGKILL
    assert not child.stopping, "its end is told as one that nobody wanted"
    assert time.monotonic() - began_s >= SILENT_S


async def test_a_child_that_gets_no_core_for_longer_than_the_bound_is_let_live(
    child: ChildProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    with busy_core(child.pid):
        began_s = time.monotonic()
        child.send_signal(signal.SIGUSR1)
        while time.monotonic() - began_s < 2 * SILENT_S:
            assert child.alive
            assert "computed" not in capfd.readouterr().err, "it was never without a core; this shows nothing"
            await asyncio.sleep(0.1)
    while "computed" not in capfd.readouterr().err:
        assert child.alive
        await asyncio.sleep(0.1)
    freeze(child.pid)
    assert (await asyncio.wait_for(child.wait(), WAIT_S)).returncode == -signal.SIGKILL
