"""The gRPC status of each error."""

import errno
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
import structlog

from runtime.errors import (
    NO_FILES,
    AsleepError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    UnknownModelError,
    WorkerLostError,
    drop_frames,
)
from runtime.sparing import Sparing

RETRY_AFTER = "retry-after-ms"

REFUSAL_LINES = 600  # a minute

log = structlog.get_logger()
spare = Sparing(REFUSAL_LINES)


@dataclass(frozen=True, slots=True)
class Status:
    code: grpc.StatusCode
    details: str
    trailing_metadata: Sequence[tuple[str, str]] = ()


def status_of(error: Exception, request_id: str) -> Status:
    """Logs refusals, and exceptions that nobody raised on purpose; the status of the latter names only the request id.
    Then drops the frames of `error`, and with them the request's message."""
    status = _status_of(error, request_id)
    drop_frames(error)
    return status


def _status_of(error: Exception, request_id: str) -> Status:
    match error:
        case InvalidRequestError():
            spare(log.info, "request refused", request_id=request_id, reason=str(error))
            unknown = isinstance(error, UnknownModelError)
            return Status(grpc.StatusCode.NOT_FOUND if unknown else grpc.StatusCode.INVALID_ARGUMENT, str(error))
        case OverloadedError():
            return Status(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), _retry_after(error.retry_after_s))
        case AsleepError():
            return Status(grpc.StatusCode.UNAVAILABLE, str(error), _retry_after(error.retry_after_s))
        case UnavailableError() | WorkerLostError():
            return Status(grpc.StatusCode.UNAVAILABLE, str(error))
        case DeadlineError():
            return Status(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        case OSError(errno=errno.EMFILE | errno.ENFILE):
            spare(log.error, "request refused", request_id=request_id, reason=str(error))
            return Status(grpc.StatusCode.UNAVAILABLE, NO_FILES)
    spare(log.error, "request failed", request_id=request_id, exc_info=error)
    return Status(grpc.StatusCode.INTERNAL, f"internal error; request {request_id}")


def _retry_after(seconds: float) -> Sequence[tuple[str, str]]:
    return ((RETRY_AFTER, str(max(1, round(seconds * 1000)))),)


def ours_alone(record: logging.LogRecord) -> bool:
    """A filter for gRPC's logger, which writes stack traces of what callers did: left while they were being answered,
    or sent metadata that are not UTF-8."""
    return record.exc_info is None or not isinstance(record.exc_info[1], grpc.aio.InternalError | UnicodeDecodeError)
