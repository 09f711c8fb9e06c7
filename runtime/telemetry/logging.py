"""Structured logs of every process: key=value for people, JSON for programs, always to stderr (stdout carries results).

A process calls `configure_logging` once, at its start. Modules log with `structlog.get_logger()`; lines that libraries
write through the standard library's logging get the same form. Lines about a request carry `request_id=...`.
"""

import contextlib
import datetime
import io
import logging
import sys
from typing import Any, TextIO, cast

import structlog
from structlog._config import BoundLoggerLazyProxy
from structlog.typing import EventDict, Processor, WrappedLogger

from runtime.config.surroundings import LoggingConfig, LogLevel
from runtime.sparing import SparingFilter

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
# Their information matters at debug level only.
STRANGERS = ("asyncio", "grpc", "uvicorn")  # speak with whoever connects
STRANGERS_LINES = 100  # a minute, by logger and level
CHATTY_LIBRARIES = ("asyncio", "httpcore", "httpx", "nats", "uvicorn", "uvicorn.access", "uvicorn.error")


class _CurrentStderr(io.TextIOBase):
    """Writes to the sys.stderr of the moment, because loggers outlive a sys.stderr that a test replaces and closes.

    A line that cannot be written, on a full disk say, is lost: it must not break what wanted to log it.
    """

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


_CURRENT_STDERR = cast(TextIO, _CurrentStderr())


def configure_logging(config: LoggingConfig, process: str) -> None:
    """`process`: a name for every line, such as `router-1`."""
    rendering = _rendering(config.format, process)
    structlog.configure(
        processors=[structlog.processors.add_log_level, *rendering],
        logger_factory=structlog.WriteLoggerFactory(_CURRENT_STDERR),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(_CURRENT_STDERR)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
            ],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    handler.addFilter(SparingFilter(STRANGERS_LINES, STRANGERS))
    logging.getLogger().handlers = [handler]
    _filter(config.level)


def set_level(name: LogLevel) -> None:
    """What is logged from now on; also by the loggers of modules, which keep the level of their first line."""
    _filter(name)
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            if type(value) is BoundLoggerLazyProxy:  # isinstance would ask foreign objects, some of which warn
                vars(value).pop("bind", None)


def _filter(name: LogLevel) -> None:
    level = LEVELS[name]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
    logging.getLogger().setLevel(level)
    for library in CHATTY_LIBRARIES:
        logging.getLogger(library).setLevel(max(level, logging.WARNING) if level > logging.DEBUG else level)


def quieten_logging() -> None:
    """Sets up a program that is not ours: warnings to stderr, and nothing changed when the program has its own
    settings."""
    if not structlog.is_configured():
        wrapper = structlog.make_filtering_bound_logger(logging.WARNING)
        structlog.configure(wrapper_class=wrapper, logger_factory=structlog.WriteLoggerFactory(_CURRENT_STDERR))


def _rendering(form: str, process: str) -> list[Processor]:
    def name_process(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
        return {"process": process, **event}

    if form == "json":
        return [
            name_process,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ]
    if not sys.stderr.isatty():
        return [name_process, structlog.processors.format_exc_info, _plain_line]
    people = structlog.dev.ConsoleRenderer(
        pad_event_to=32, exception_formatter=structlog.dev.plain_traceback, sort_keys=False
    )
    return [name_process, structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False), people]


def _plain_line(_logger: WrappedLogger, _name: str, event: EventDict) -> str:
    """The line of structlog's console renderer without colours, at a fifth of the cost, because a router writes a line
    for every request."""
    level, text, exception = event.pop("level", ""), event.pop("event", ""), event.pop("exception", "")
    time = datetime.datetime.now().strftime("%H:%M:%S.%f")
    keys = " ".join([f"{key}={_plain_value(value)}" for key, value in event.items()])
    line = f"{time} [{level:<9}] {text:<32} {keys}"
    return f"{line}\n{exception}" if exception else line


def _plain_value(value: Any) -> str:
    if isinstance(value, str):
        return value if value.isprintable() and value and not set(value) & {" ", "=", "'", '"'} else repr(value)
    return repr(value)
