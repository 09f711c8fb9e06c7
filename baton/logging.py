"""Structured logs of every process: key=value for people, JSON for programs, always to stderr (stdout carries results).

`configure_logging` is called once, first thing in a process. Modules log with `structlog.get_logger()`; what libraries
write through the standard library's logging comes out in the same form. Lines about a request name it:
`request_id=...`.
"""

import logging
import sys
from typing import Any

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from baton.config import LoggingConfig

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
# Their news are ours at debug level only.
CHATTY_LIBRARIES = ("asyncio", "httpcore", "httpx", "nats", "uvicorn", "uvicorn.access", "uvicorn.error")


def configure_logging(config: LoggingConfig, process: str) -> None:
    """`process` stands in every line, such as `router-1`."""
    level = LEVELS[config.level]
    structlog.configure(
        processors=[structlog.processors.add_log_level, _to_stdlib],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
            ],
            processors=_rendering(config.format, process),
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name in CHATTY_LIBRARIES:
        logging.getLogger(name).setLevel(max(level, logging.WARNING) if level > logging.DEBUG else level)


def _to_stdlib(logger: WrappedLogger, name: str, event: EventDict) -> Any:
    return structlog.stdlib.ProcessorFormatter.wrap_for_formatter(logger, name, event)


def _rendering(form: str, process: str) -> list[Processor]:
    def name_process(_logger: WrappedLogger, _name: str, event: EventDict) -> EventDict:
        return {"process": process, **event}

    first: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta, name_process]
    if form == "json":
        return [
            *first,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ]
    people = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), pad_event_to=32, exception_formatter=structlog.dev.plain_traceback, sort_keys=False
    )
    return [*first, structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False), people]
