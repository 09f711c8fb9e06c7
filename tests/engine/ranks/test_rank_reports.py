"""What ranks report to rank 0, through real sockets."""

import os
import queue
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engine.ranks.rank_reports import MAX_REPORT_BYTES, ReportReader, ReportWriter
from kvtransfer.prefill_side.push import PushResult
from runtime.errors import ProtocolError
from tests.open_files import open_files

TIMEOUT_S = 60.0


class Reports:
    """A reader, and the ends of ranks 1 and 2 in the same process."""

    def __init__(self) -> None:
        self.malformed: queue.Queue[tuple[int, str]] = queue.Queue()
        self.ended: queue.Queue[tuple[int, str, PushResult]] = queue.Queue()
        self.reader = ReportReader(2, lambda *told: self.malformed.put(told))
        self.reader.on_push_ended = lambda *told: self.ended.put(told)
        self.ends = [os.dup(self.reader.writing_end(rank)) for rank in (1, 2)]
        self.reader.start()
        self.raw = socket.socket(fileno=os.dup(self.ends[0]))
        self.writers = [ReportWriter(end) for end in self.ends]

    def close(self) -> None:
        self.reader.close()
        self.raw.close()
        for writer in self.writers:
            writer._socket.close()


@pytest.fixture
def reports() -> Iterator[Reports]:
    before = open_files()
    reports = Reports()
    yield reports
    reports.close()
    assert open_files() <= before


def result(reason: str) -> PushResult:
    return PushResult(False, reason, "", 0, 3, 0.25)


def test_ends_of_pushes_arrive_in_order_and_whole_whatever_threads_write(reports: Reports) -> None:
    def write(rank: int, name: str) -> None:
        for number in range(300):
            reports.writers[rank - 1].push_ended(f"{name}-{number}", result("why " * number))

    threads = [threading.Thread(target=write, args=args) for args in ((1, "a"), (1, "b"), (2, "c"))]
    for thread in threads:
        thread.start()
    seen: dict[str, list[tuple[int, str, PushResult]]] = {"a": [], "b": [], "c": []}
    for _ in range(900):
        told = reports.ended.get(timeout=TIMEOUT_S)
        seen[told[1][0]].append(told)
    for name, rank in (("a", 1), ("b", 1), ("c", 2)):
        assert seen[name] == [(rank, f"{name}-{number}", result("why " * number)) for number in range(300)]


def test_a_slab_comes_with_its_descriptor(reports: Reports) -> None:
    memory = os.memfd_create("slab")
    os.write(memory, b"known bytes")
    reports.writers[1].slab_exported(memory)
    fd = reports.reader.slab(2, TIMEOUT_S)
    assert fd is not None
    assert os.pread(fd, 100, 0) == b"known bytes"
    os.close(fd)
    assert reports.reader.slab(1, 0.01) is None
    reports.writers[0].slab_exported(os.memfd_create("nobody takes it"))
    reports.writers[0].push_ended("t", result("after it"))
    assert reports.ended.get(timeout=TIMEOUT_S)[0] == 1  # and the fixture sees that the descriptor goes with the reader


@pytest.mark.parametrize(
    ("data", "fds"),
    [(b"garbage", 0), (b"\x91\xadslab_exported", 0), (b"\x91\xadslab_exported", 2), (bytes(MAX_REPORT_BYTES + 1), 0)],
    ids=["garbage", "no descriptor", "two descriptors", "too long"],
)
def test_a_malformed_report_is_told_and_the_others_are_read_on(reports: Reports, data: bytes, fds: int) -> None:
    sent = [os.memfd_create("x") for _ in range(fds)]
    socket.send_fds(reports.raw, [data], sent)
    for fd in sent:
        os.close(fd)
    rank, problem = reports.malformed.get(timeout=TIMEOUT_S)
    assert rank == 1
    assert "malformed report" in problem
    reports.writers[1].push_ended("t", result(""))
    assert reports.ended.get(timeout=TIMEOUT_S)[0] == 2


def test_a_report_that_its_listener_cannot_place_counts_as_malformed(reports: Reports) -> None:
    def refuse(*_: Any) -> None:
        raise ProtocolError("rank 2", "ended push t, which nobody awaits of it")

    reports.reader.on_push_ended = refuse
    reports.writers[1].push_ended("t", result(""))
    assert reports.malformed.get(timeout=TIMEOUT_S) == (2, "ended push t, which nobody awaits of it")


def test_a_rank_that_has_gone_is_no_report(reports: Reports) -> None:
    reports.raw.close()
    reports.writers[0]._socket.close()
    reports.writers[1].push_ended("t", result(""))
    assert reports.ended.get(timeout=TIMEOUT_S)[0] == 2
    assert reports.malformed.empty()
