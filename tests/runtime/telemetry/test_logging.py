"""Log lines: their form, their place, and their level."""

import io
import json
import logging

import pytest
import structlog

from runtime.config.surroundings import LoggingConfig
from runtime.telemetry.logging import configure_logging


def test_console_lines_are_key_equals_value_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LoggingConfig(), "router-1")
    structlog.get_logger().info("request admitted", prompt_tokens=5, model="a b")
    captured = capsys.readouterr()
    assert captured.out == ""
    for part in ("info", "request admitted", "process=router-1", "prompt_tokens=5", "model='a b'"):
        assert part in captured.err
    assert captured.err.count("\n") == 1
    assert "\x1b[" not in captured.err  # no colours outside a terminal


def test_json_lines_hold_time_level_process_and_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LoggingConfig(format="json"), "decode-2")
    structlog.get_logger().warning("worker lost", worker_id="prefill-1", path={"not": "json", "object": object})
    line = json.loads(capsys.readouterr().err)
    assert line["event"] == "worker lost"
    assert line["level"] == "warning"
    assert line["process"] == "decode-2"
    assert line["worker_id"] == "prefill-1"
    assert line["timestamp"].endswith("Z")


@pytest.mark.parametrize(("level", "seen"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_the_level_decides_what_is_written(level: str, seen: int, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LoggingConfig(level=level), "x")  # type: ignore[arg-type]
    log = structlog.get_logger()
    log.debug("a")
    log.info("b")
    log.warning("c")
    log.error("d")
    assert capsys.readouterr().err.count("process=x") == seen


def test_what_libraries_log_has_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LoggingConfig(format="json"), "router-1")
    logging.getLogger("some.library").error("lost %d of %d", 1, 2)
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["logger"], line["process"]) == ("lost 1 of 2", "some.library", "router-1")


def test_an_exception_is_logged_with_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(LoggingConfig(format="json"), "x")
    try:
        raise ValueError("seventeen")
    except ValueError:
        structlog.get_logger().exception("step failed")
    assert "ValueError: seventeen" in json.loads(capsys.readouterr().err)["exception"]


def test_chatty_libraries_are_heard_at_debug_level_only(capsys: pytest.CaptureFixture[str]) -> None:
    for level, seen in (("info", False), ("debug", True), ("info", False)):
        configure_logging(LoggingConfig(level=level), "x")  # type: ignore[arg-type]
        logging.getLogger("httpx").info("GET /")
        assert ("GET /" in capsys.readouterr().err) is seen


def test_a_logger_that_was_used_before_writes_to_the_stderr_of_the_moment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, first = structlog.get_logger(), io.StringIO()
    with monkeypatch.context() as patched:
        patched.setattr("sys.stderr", first)
        configure_logging(LoggingConfig(), "router-1")
        log.info("early")
    first.close()
    log.info("late")
    assert "late" in capsys.readouterr().err


def test_a_line_that_cannot_be_written_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    configure_logging(LoggingConfig(), "x")
    monkeypatch.setattr("sys.stderr", FullDisk())
    structlog.get_logger().info("lost")
    logging.getLogger("asyncio").error("lost too")
