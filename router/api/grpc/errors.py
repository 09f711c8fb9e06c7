"""The gRPC status of each error."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
import structlog

from runtime.errors import (
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    UnknownModelError,
    WorkerLostError,
)

RETRY_AFTER = "retry-after-ms"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Status:
    code: grpc.StatusCode
    details: str
    trailing_metadata: Sequence[tuple[str, str]] = ()


def status_of(error: Exception, request_id: str) -> Status:
    """Logs refusals, and exceptions that nobody raised on purpose; the status of the latter names only the request
    id."""
    match error:
        case InvalidRequestError():
            log.info("request refused", request_id=request_id, reason=str(error))
            unknown = isinstance(error, UnknownModelError)
            return Status(grpc.StatusCode.NOT_FOUND if unknown else grpc.StatusCode.INVALID_ARGUMENT, str(error))
        case OverloadedError():
            retry_after_ms = str(max(1, round(error.retry_after_s * 1000)))
            return Status(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), ((RETRY_AFTER, retry_after_ms),))
        case UnavailableError() | WorkerLostError():
            return Status(grpc.StatusCode.UNAVAILABLE, str(error))
        case DeadlineError():
            return Status(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
    log.error("request failed", request_id=request_id, exc_info=error)
    return Status(grpc.StatusCode.INTERNAL, f"internal error; request {request_id}")


def drop_lost_callers(record: logging.LogRecord) -> bool:
    """A filter for the logger of gRPC, which writes a stack trace when a caller leaves while it is being answered."""
    return record.exc_info is None or not isinstance(record.exc_info[1], grpc.aio.InternalError)
