"""The logs of several processes, read as one."""

import os
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from baton.service.logs.log_file import LONG_BYTES, PIECE_BYTES, shorten
from baton.service.logs.merged_logs import Entry, MergedLogs

NOW = datetime.now().replace(microsecond=0)


def moment(seconds: float) -> datetime:
    return NOW - timedelta(hours=1) + timedelta(seconds=seconds)


def plain(seconds: float, words: str) -> str:
    return f"{moment(seconds):%H:%M:%S.%f} [info     ] {words}\n"


def nats(seconds: float, words: str) -> str:
    return f"[77] {moment(seconds):%Y/%m/%d %H:%M:%S.%f} [INF] {words}\n"


def as_json(seconds: float, words: str) -> str:
    return f'{{"process": "{words}", "timestamp": "{moment(seconds).astimezone().isoformat()}"}}\n'


def shown(entries: list[Entry]) -> list[str]:
    return [line for entry in entries for line in entry.text.splitlines(keepends=True)]


def written(path: Path, text: str, seconds: float) -> None:
    path.write_text(text)
    os.utime(path, (moment(seconds).timestamp(),) * 2)


def test_lines_of_all_files_come_in_the_order_of_time_and_tracebacks_stay_whole(tmp_path: Path) -> None:
    written(tmp_path / "router-1.log", plain(1, "one") + plain(4, "four") + "Traceback\n  at 10:00:00.1 here\n", 4)
    written(tmp_path / "nats.log", nats(0, "zero") + nats(3, "three"), 3)
    written(tmp_path / "decode-1.log", as_json(2, "two") + as_json(5, "five"), 5)
    lines = shown(MergedLogs(tmp_path).tail(100))
    words = ("zero", "one", "two", "three", "four", "Traceback", "here", "five")
    assert [word in line for word, line in zip(words, lines, strict=True)] == [True] * 8
    assert shown(MergedLogs(tmp_path).tail(2))[-2:] == lines[-2:]
    assert MergedLogs(tmp_path).tail(0) == []


@pytest.mark.parametrize(
    "line",
    [
        '  body = {"timestamp": "soon"}',
        '{"timestamp": "0001-01-01T00:00:00"}',
        '{"timestamp": "0001-01-01T00:00:00Z"}',
        '{"timestamp": "9999-12-31T23:59:59Z"}',
        "25:61:00.1 hi",
        "12:00:00.1234567 hi",
        "[7] 2026/01/01 99:00:00.1 hi",
    ],
)
def test_a_line_that_only_resembles_a_time_stays_behind_the_one_before(tmp_path: Path, line: str) -> None:
    written(tmp_path / "a.log", plain(1, "one") + line + "\n" + plain(3, "three"), 3)
    written(tmp_path / "b.log", plain(2, "two"), 2)
    logs = MergedLogs(tmp_path)
    assert [said.split()[-1] for said in shown(logs.tail(9))] == ["one", line.split()[-1], "two", "three"]
    (tmp_path / "c.log").write_text(line + "\n")
    assert shown(logs.news()) == [line + "\n"]


def test_a_line_before_midnight_comes_before_one_after_it(tmp_path: Path) -> None:
    midnight = NOW.replace(hour=0, minute=0, second=0) - moment(0)
    late, early = midnight.total_seconds() - 1, midnight.total_seconds() + 1
    written(tmp_path / "a.log", plain(late, "late") + plain(early, "early"), early)
    written(tmp_path / "b.log", plain(late - 1, "before"), late - 1)
    assert [line.split()[-1] for line in shown(MergedLogs(tmp_path).tail(9))] == ["before", "late", "early"]


def test_news_are_whole_lines_of_old_and_new_files(tmp_path: Path) -> None:
    written(tmp_path / "a.log", plain(1, "old"), 1)
    logs = MergedLogs(tmp_path)
    logs.tail(1)
    assert shown(logs.news()) == []
    with (tmp_path / "a.log").open("a") as file:
        file.write(plain(4, "four") + "hal")
    (tmp_path / "b.log").write_text(plain(3, "drei, français"))
    assert [line.split("] ")[-1] for line in shown(logs.news())] == ["drei, français\n", "four\n"]
    with (tmp_path / "a.log").open("a") as file:
        file.write("f\n")
    assert shown(logs.news()) == ["half\n"]


def test_one_process_is_read_alone_and_a_link_to_where_it_logs_is_followed(tmp_path: Path) -> None:
    (tmp_path / "life-1").write_text(plain(1, "first life"))
    (tmp_path / "control.log").symlink_to(tmp_path / "life-1")
    (tmp_path / "router-1.log").write_text(plain(1, "another"))
    logs = MergedLogs(tmp_path, "control")
    assert sorted(logs.processes()) == ["control", "router-1"]
    assert [entry.process for entry in logs.tail(9)] == ["control"]
    (tmp_path / "life-2").write_text(plain(2, "second life, which says more than the first one"))
    (tmp_path / "control.log").unlink()
    (tmp_path / "control.log").symlink_to(tmp_path / "life-2")
    assert shown(logs.news()) == [plain(2, "second life, which says more than the first one")]


def test_a_log_that_is_shortened_is_followed_without_a_gap_and_its_last_lines_are_still_found(tmp_path: Path) -> None:
    path = tmp_path / "router-1.log"
    path.write_bytes(b"x" * LONG_BYTES + b"\n" + plain(1, "seen").encode())
    logs = MergedLogs(tmp_path)
    logs.tail(1)
    with path.open("a") as file:  # as a process writes it
        file.write(plain(2, "before"))
        file.flush()
        shorten(path)
        file.write(plain(3, "after"))
    assert path.stat().st_size < 100
    assert shown(logs.news()) == [plain(2, "before"), plain(3, "after")]
    assert shown(logs.news()) == []
    assert shown(MergedLogs(tmp_path).tail(3))[-3:] == [plain(1, "seen"), plain(2, "before"), plain(3, "after")]
    shorten(path)
    assert path.stat().st_size > 0  # it is short now


def test_a_log_that_was_shortened_and_has_grown_past_what_was_read_is_followed_without_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "router-1.log"
    path.write_text(plain(1, "seen"))
    logs = MergedLogs(tmp_path)
    logs.tail(1)
    filling = [f"filling {number:0{PIECE_BYTES // 4}}\n" for number in range(4 * LONG_BYTES // PIECE_BYTES)]
    with path.open("a") as file:
        file.write("".join(filling) + plain(2, "before"))
        file.flush()
        shorten(path)
        file.write(plain(3, "after") * 9)
    assert path.stat().st_size > len(plain(1, "seen"))
    found: list[str] = []
    while news := shown(logs.news()):
        assert sum(map(len, news)) <= 2 * PIECE_BYTES
        found += news
    assert found == [*filling, plain(2, "before"), *[plain(3, "after")] * 9]


def test_a_file_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(plain(1, "first"))
    (tmp_path / "b.log").symlink_to(tmp_path / "has gone")
    (tmp_path / "c.log").write_text(plain(2, "second"))
    assert len(MergedLogs(tmp_path).tail(9)) == 2
    (tmp_path / "d.log").mkdir()
    assert shown(MergedLogs(tmp_path).news()) == [plain(1, "first"), plain(2, "second")]
