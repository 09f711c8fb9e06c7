"""Processes of tests' services whose starter goes, as one does that is cancelled, end; those after them start."""

import os
import socket

import psutil
import pytest

from tests.forked import IMPORTED, ForkedRank, Request, asked
from tests.service import assert_gone

STAYS = Request("http.server", ["0", "--bind", "127.0.0.1"], dict(os.environ))


def started() -> socket.socket:
    with open(os.devnull, "w") as nowhere:
        return asked(STAYS, nowhere.fileno(), nowhere.fileno())


def test_a_process_that_nobody_waits_for_ends_and_the_next_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(IMPORTED, "http.server", ("socketserver",))
    left = started()
    first, second = ForkedRank(left), ForkedRank(started())
    template = psutil.Process(first.pid).parent()
    assert template is not None
    started().close()  # before it is told the pid
    left.close()
    third = ForkedRank(started())
    assert_gone({first.pid, *(one.pid for one in template.children())} - {second.pid, third.pid})
    for one in (second, third):
        assert psutil.pid_exists(one.pid)
        one.kill()
        assert one.wait(10) == -9
