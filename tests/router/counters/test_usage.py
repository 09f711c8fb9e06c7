"""What callers used, in counters and in lines."""

import errno
import json
import os
from pathlib import Path

import pytest

from baton_proto.token_counts import TokenCounts
from router.counters import usage
from router.counters.metrics import RouterMetrics
from router.counters.tally import RequestTally
from router.counters.usage import Payer, Usage, UsageLog
from runtime.errors import ConfigError, OverloadedError

ACME = Payer("key-1", "acme", "tiny")


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_callers_beyond_the_bound_are_counted_together_and_those_before_it_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(usage, "MAX_PAYERS", 2)
    counted = Usage()
    for name in ("a", "b", "c", "d", "a"):
        counted.add(Payer(name, name, "tiny"), "r", "completed", TokenCounts(10, 4, 1), 1.0)
    assert dict(counted.of("prompt_tokens")) == {
        ("a", "a", "tiny"): 20,
        ("b", "b", "tiny"): 10,
        ("others", "others", "tiny"): 20,
    }


def test_a_request_that_no_worker_ran_uses_nothing() -> None:
    metrics = RouterMetrics()
    with pytest.raises(OverloadedError), RequestTally(metrics, "r", 7, ACME):
        raise OverloadedError("queue", 1, 1.0)
    assert dict(metrics.usage.of("prompt_tokens")) == {ACME: 0}


def test_lines_go_on_in_a_new_file_when_theirs_was_moved_away(tmp_path: Path) -> None:
    path, moved = tmp_path / "usage.jsonl", tmp_path / "usage.jsonl.1"
    metrics = RouterMetrics()
    metrics.usage.log = log = UsageLog(str(path), "router-2")
    with RequestTally(metrics, "first", 7, ACME):
        pass
    log.write()
    path.rename(moved)
    with RequestTally(metrics, "second", 7, ACME):
        pass
    log.close()
    (first,), (second,) = lines_of(moved), lines_of(path)
    assert (first["request_id"], second["request_id"]) == ("first", "second")
    told = {"router": "router-2", "key": "key-1", "tenant": "acme", "model": "tiny", "outcome": "completed"}
    assert told.items() <= first.items()


def test_lines_that_come_faster_than_they_are_written_push_out_the_oldest_and_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "MAX_WAITING", 3)
    monkeypatch.setattr(usage, "WRITE_S", 60.0)
    path, counted = tmp_path / "usage.jsonl", Usage()
    counted.log = UsageLog(str(path), "router-1")
    for number in range(5):
        counted.add(ACME, f"r{number}", "completed", TokenCounts(1, 0, 1), 1.0)
    counted.log.close()
    assert [line["request_id"] for line in lines_of(path)] == ["r2", "r3", "r4"]
    assert counted.lines_lost() == 2


def test_a_line_that_a_full_disk_has_cut_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, counted, write = tmp_path / "usage.jsonl", Usage(), os.write
    room = [20]

    def fill(file: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[: room.pop()])

    monkeypatch.setattr(usage, "WRITE_S", 60.0)
    counted.log = UsageLog(str(path), "router-1")
    counted.add(ACME, "cut", "completed", TokenCounts(1, 0, 1), 1.0)
    with monkeypatch.context() as full:
        full.setattr(os, "write", fill)
        counted.log.write()
    counted.add(ACME, "whole", "completed", TokenCounts(1, 0, 1), 1.0)
    counted.log.close()
    last = path.read_text().splitlines()[-1]
    assert json.loads(last)["request_id"] == "whole"
    assert counted.lines_lost() == 1


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"logging\.usage"):
        UsageLog(str(tmp_path / "missing" / "usage.jsonl"), "router-1")
