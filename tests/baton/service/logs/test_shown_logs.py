"""Logs that are shown on a stderr that takes nothing: here a pipe that nobody reads."""

import fcntl
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from baton.service.logs import log_file, repeated_work, shown_logs
from baton.service.logs.short_logs import ShortLogs

LONG_BYTES = 100_000
LINE = "x" * 99 + "\n"


def test_files_stay_short_while_our_stderr_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "PIECE_BYTES", LONG_BYTES // 10)
    monkeypatch.setattr(repeated_work, "INTERVAL_S", 0.001)
    out, into = os.pipe()
    os.write(into, bytes(fcntl.fcntl(into, fcntl.F_GETPIPE_SZ)))
    monkeypatch.setattr(shown_logs, "STDERR", into)
    path = tmp_path / "router-1.log"
    path.touch()
    shown, short = shown_logs.ShownLogs(tmp_path), ShortLogs(LONG_BYTES)
    short.add(path)
    for number in range(5):
        with path.open("a") as file:
            file.write(LINE * (2 * LONG_BYTES // len(LINE)) + f"end of {number}\n")
        while path.stat().st_size:
            os.sched_yield()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 5 * LONG_BYTES
    with path.open("a") as file:
        file.write("end\n")
    with os.fdopen(out, "rb") as reader:
        found = b""
        while not found.endswith(b"\nend\n"):
            found += os.read(reader.fileno(), 65536)
    assert b"end of 4\n" in found
    shown.close()
    short.close()
    os.close(into)


def test_a_process_ends_although_its_stderr_takes_nothing(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        from baton.service.logs import repeated_work, shown_logs

        repeated_work.CLOSE_S = 0.5
        shown_logs.ShownLogs(Path(sys.argv[1])).close()
    """)
    (tmp_path / "router-1.log").write_text(LINE * 10_000)
    command = [sys.executable, "-c", program, str(tmp_path)]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=buffered) as process:
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()
