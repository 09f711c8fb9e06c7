"""The end of a log, and what is written behind it."""

from pathlib import Path

from baton.service.logs.log_file import TAIL_BYTES, Position, log_since, log_tail


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
