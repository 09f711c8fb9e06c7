"""A child's start, readiness and end, with small programs in the place of a router or worker."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from baton.service.local.child_process import ChildProcess, environment
from runtime.processes.process import ProcessExit, ProcessFailedError
from tests.service import assert_gone

READY_LINE = (
    """print('BATON_READY {"process": "child", "id": "child-1", "pid": 1, "addresses": {"grpc": "127.0.0.1:9"}}')"""
)

DRAIN_ON_TERM = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))"


def child_that(folder: Path, *lines: str) -> ChildProcess:
    (folder / "child_program.py").write_text("import signal, sys, time\n" + "\n".join(lines))
    variables = environment(1) | {"PYTHONPATH": str(folder)}
    return ChildProcess("child-1", "child_program", [], variables, folder / "child-1.log")


async def test_a_child_is_ready_when_it_says_so(tmp_path: Path) -> None:
    child = child_that(tmp_path, "print('some other line')", DRAIN_ON_TERM, READY_LINE, "time.sleep(60)")
    await child.start()
    ready = await child.wait_ready(10)
    assert ready.addresses == {"grpc": "127.0.0.1:9"}
    assert child.was_ready
    assert await child.stop(10)
    assert not child.alive


async def test_json_lines_of_a_child_go_to_stdout_as_they_are_and_other_lines_do_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    child = child_that(tmp_path, READY_LINE, """print('{"key": "key-1"}')""", "print('some other line')")
    await child.start()
    await child.wait_ready(10)
    await child.wait()
    said = capfd.readouterr()
    assert said.out == '{"key": "key-1"}\n'
    assert "child-1: some other line" in said.err


async def test_a_child_that_exits_early_fails_at_once_with_its_last_log_lines(tmp_path: Path) -> None:
    child = child_that(tmp_path, "print('the port is taken', file=sys.stderr)", "sys.exit(3)")
    await child.start()
    with pytest.raises(ProcessFailedError, match=r"(?s)exited with code 3 before it was ready.*the port is taken"):
        await child.wait_ready(30)


async def test_the_last_lines_of_a_log_that_was_just_shortened_are_in_the_file_beside_it(tmp_path: Path) -> None:
    child = child_that(tmp_path)
    (tmp_path / "child-1.log").write_text("now\n")
    (tmp_path / "child-1.log.1").write_text("before\n")
    assert child.log_tail() == "before\nnow"


async def test_a_child_that_is_never_ready_fails_when_the_time_is_up(tmp_path: Path) -> None:
    child = child_that(tmp_path, "time.sleep(60)")
    await child.start()
    with pytest.raises(ProcessFailedError, match="was not ready within"):
        await child.wait_ready(0.1)
    await child.kill()


async def test_a_malformed_readiness_line_is_an_error(tmp_path: Path) -> None:
    child = child_that(tmp_path, "print('BATON_READY soon', flush=True)", "time.sleep(60)")
    await child.start()
    with pytest.raises(ProcessFailedError, match="wrong form"):
        await child.wait_ready(30)
    await child.kill()


async def test_a_child_that_does_not_drain_in_time_is_killed(tmp_path: Path) -> None:
    child = child_that(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)", READY_LINE, "time.sleep(60)")
    await child.start()
    await child.wait_ready(30)
    assert not await child.stop(0.2)
    assert (await child.wait()).returncode == -signal.SIGKILL


async def test_a_child_that_does_not_end_in_order_is_told(tmp_path: Path) -> None:
    child = child_that(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))", READY_LINE, "time.sleep(60)")
    await child.start()
    await child.wait_ready(30)
    assert not await child.stop(10)
    assert (await child.wait()).returncode == 5


async def test_stopping_a_child_that_has_ended_is_no_error(tmp_path: Path) -> None:
    child = child_that(tmp_path, READY_LINE)
    await child.start()
    await child.wait()
    assert await child.stop(1)


async def test_ctrl_c_in_the_terminal_does_not_reach_a_child(tmp_path: Path) -> None:
    child = child_that(tmp_path, READY_LINE, "time.sleep(60)")
    await child.start()
    await child.wait_ready(30)
    assert os.getpgid(child.pid) != os.getpgid(0)
    await child.kill()


async def test_a_folder_with_the_name_of_a_module_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    child = child_that(tmp_path, READY_LINE)
    (tmp_path / "elsewhere" / "child_program.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path / "elsewhere")
    await child.start()
    await child.wait_ready(30)
    assert (await child.wait()).returncode == 0


def test_a_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text("import time\n" + READY_LINE + "\ntime.sleep(60)")
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(
                """
                import asyncio
                from pathlib import Path
                from baton.service.local.child_process import ChildProcess, environment

                async def main():
                    child = ChildProcess("sleeper", "sleeper", [], environment(1), None)
                    await child.start()
                    await child.wait_ready(30)
                    print("started", flush=True)
                    await asyncio.sleep(60)

                asyncio.run(main())
                """
            ),
        ],
        env=environment(1) | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        stdout=subprocess.PIPE,
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        children = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
        assert children
        parent.kill()
    assert_gone(children)


def test_the_end_of_a_child_is_said_in_words() -> None:
    assert str(ProcessExit("decode-1", 7, -9)) == "decode-1 (pid 7) was ended by SIGKILL"
    assert str(ProcessExit("decode-1", 7, 1)) == "decode-1 (pid 7) exited with code 1"
    assert str(ProcessExit("nats", 7, None)) == "nats (pid 7) has ended"


async def test_a_wait_that_is_cancelled_leaves_the_child_alone(tmp_path: Path) -> None:
    child = child_that(tmp_path, READY_LINE, "time.sleep(60)")
    await child.start()
    await child.wait_ready(30)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(child.wait(), 0.05)
    assert child.alive
    await child.kill()
