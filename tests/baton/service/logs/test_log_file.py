"""The end of a log, and what is written behind it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.service.logs import log_file
from baton.service.logs.log_file import LEFT_OUT, TAIL_BYTES, Position, log_since, log_tail, older, shorten


def test_the_last_lines_and_then_what_comes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\ntwo\nthree\n")
    text, position = log_tail(path, 2)
    assert text == "two\nthree\n"
    assert log_since(path, position) == ("", position)
    with path.open("a") as file:
        file.write("four\nfi")
    text, position = log_since(path, position)
    assert text == "four\n"
    assert position == Position(path.stat().st_size - 2)
    with path.open("a") as file:
        file.write("ve\n")
    assert log_since(path, position) == ("five\n", Position(path.stat().st_size))
    assert log_tail(path, 0) == ("", Position(path.stat().st_size))


def test_a_long_log_is_read_from_near_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("x" * 99 + "\n" + ("y" * 99 + "\n") * (TAIL_BYTES // 100 + 10))
    text, _ = log_tail(path, 1_000_000)
    assert len(text) == TAIL_BYTES
    assert "x" not in text


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log that is long from its first line on, of which a reader gets two lines at a time."""
    monkeypatch.setattr(log_file, "PIECE_BYTES", len(line(0)) * 2 + 1)
    return tmp_path / "log"


def line(number: int) -> str:
    return f"line {number:03}\n"


def write(path: Path, *numbers: int) -> None:
    with path.open("a") as file:
        file.writelines(map(line, numbers))


def read_on(path: Path, position: Position) -> Iterator[str]:
    text = " "
    while text:
        text, position = log_since(path, position)
        yield text


@pytest.mark.parametrize("seen", [1, 3])
def test_a_reader_gets_all_that_is_there_of_a_log_that_was_shortened_twice_and_is_told_of_the_rest(
    log: Path, seen: int
) -> None:
    write(log, *range(seen))
    _, position = log_tail(log, 9)
    write(log, 10)  # is lost
    shorten(log, 0)
    write(log, 20, 21, 22, 23, 24)
    shorten(log, 0)
    write(log, 30)
    assert "".join(read_on(log, position)) == LEFT_OUT + "".join(map(line, (20, 21, 22, 23, 24, 30)))


def test_a_reader_in_mid_file_beside_a_log_that_is_shortened_again_goes_on_with_what_is_there(log: Path) -> None:
    write(log, 0)
    _, position = log_tail(log, 9)
    write(log, 10, 11, 12, 13)
    shorten(log, 0)
    write(log, 20, 21)
    text, position = log_since(log, position)
    assert text == line(10) + line(11)
    shorten(log, 0)
    assert "".join(read_on(log, position)) == LEFT_OUT + line(20) + line(21)


def test_a_log_that_is_shortened_while_it_is_read_is_read_again(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(log, 0)
    _, position = log_tail(log, 9)
    write(log, 10)
    piece = log_file._piece

    def shortened_first(path: Path, offset: int) -> bytes:
        monkeypatch.setattr(log_file, "_piece", piece)
        shorten(log, 0)
        write(log, 20, 21)
        return piece(path, offset)

    monkeypatch.setattr(log_file, "_piece", shortened_first)
    assert "".join(read_on(log, position)) == "".join(map(line, (10, 20, 21)))


def test_a_log_whose_shortening_goes_on_is_read_from_the_file_beside_it(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(log, 0)
    _, position = log_tail(log, 9)
    write(log, 10)
    truncate = log_file.os.truncate
    seen: list[object] = []

    def watched(path: Path, length: int) -> None:
        for _ in range(2):
            seen.append((log_tail(log, 9)[0], log_since(log, position)[0]))
            truncate(path, length)
        tail = log_tail(log, 0)[1]
        write(log, 20)
        seen.append(log_since(log, tail)[0])

    monkeypatch.setattr(log_file.os, "truncate", watched)
    shorten(log, 0)
    assert seen == [(line(0) + line(10), line(10))] * 2 + [""]
    assert "".join(read_on(log, position)) == line(10) + line(20)


def test_a_line_that_is_written_and_read_behind_the_copy_brings_back_no_line_that_was_read(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(log, 1, 2, 3)
    _, position = log_tail(log, 0)
    replace = Path.replace

    def late(copy: Path, target: Path) -> Path:
        nonlocal position
        write(log, 4)
        text, position = log_since(log, position)
        assert text == line(4)
        return replace(copy, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", late)
        shorten(log, 0)
    write(log, 5)
    assert "".join(read_on(log, position)) == line(5)


def test_a_log_of_which_only_a_copy_was_kept_is_read_to_its_end(log: Path, tmp_path: Path) -> None:
    write(log, 0)
    shorten(log, 0)
    write(log, 1)
    copy = tmp_path / "copies" / "log"
    copy.parent.mkdir()
    for path in (log, older(log)):
        shutil.copyfile(path, copy.parent / path.name)
    text, position = log_tail(copy, 9)
    assert text == line(0) + line(1)
    write(copy, 2)
    assert log_since(copy, position)[0] == line(2)
