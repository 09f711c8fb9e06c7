"""Errors over HTTP: OpenAI's `{"error": {message, type, param, code}}` with the status that OpenAI's clients expect."""

import errno
import math
from collections.abc import Callable

import structlog
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from router.api.http.json_response import RETRY_AFTER, json_response
from runtime.errors import (
    NO_FILES,
    AsleepError,
    BodyTooLargeError,
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    RateLimitError,
    TooLateError,
    UnavailableError,
    UnknownModelError,
    WorkerLostError,
    drop_frames,
)
from runtime.sparing import Sparing

REFUSAL_LINES = 600  # a minute

log = structlog.get_logger()
spare = Sparing(REFUSAL_LINES)


class ErrorBody(Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(Struct, frozen=True):
    error: ErrorBody


ErrorForm = Callable[[int, ErrorBody, str], Struct]
"""(HTTP status, error, request id) -> the body of a protocol that says the same in another form."""


def openai_form(status: int, error: ErrorBody, request_id: str) -> ErrorAnswer:
    return ErrorAnswer(error)


def describe(error: Exception, request_id: str) -> tuple[int, ErrorBody]:
    """(HTTP status, error). Logs refusals, and exceptions that nobody raised on purpose; the body of the latter names
    only the request id. Then drops the frames of `error`, and with them the request's body."""
    described = _described(error, request_id)
    drop_frames(error)
    return described


def _described(error: Exception, request_id: str) -> tuple[int, ErrorBody]:
    match error:
        case InvalidRequestError():
            spare(log.info, "request refused", request_id=request_id, reason=str(error))
            status, code = _status_of_refusal(error)
            return status, ErrorBody(str(error), "invalid_request_error", error.field, code)
        case RateLimitError():
            return 429, ErrorBody(str(error), "rate_limit_error", code="rate_limit_exceeded")
        case TooLateError():
            return 429, ErrorBody(str(error), "rate_limit_error", code="too_late")
        case OverloadedError():
            return 429, ErrorBody(str(error), "rate_limit_error", code="overloaded")
        case UnavailableError() | WorkerLostError():
            return 503, ErrorBody(str(error), "service_unavailable_error", code="unavailable")
        case DeadlineError():
            return 504, ErrorBody(str(error), "timeout_error", code="deadline_exceeded")
        case OSError(errno=errno.EMFILE | errno.ENFILE):
            spare(log.error, "request refused", request_id=request_id, reason=str(error))
            return 503, ErrorBody(NO_FILES, "service_unavailable_error", code="unavailable")
    spare(log.error, "request failed", request_id=request_id, exc_info=error)
    message = f"internal error; request {request_id}"
    return 500, ErrorBody(message, "server_error", code="internal_error")


def error_response(error: Exception, request_id: str, form: ErrorForm = openai_form) -> Response:
    status, described = describe(error, request_id)
    headers = {"x-request-id": request_id}
    if isinstance(error, OverloadedError | AsleepError):
        headers[RETRY_AFTER] = str(max(1, math.ceil(error.retry_after_s)))
    return json_response(form(status, described, request_id), status, headers)


def client_of(scope: Scope) -> str:
    """The address that a request comes from."""
    return str((scope.get("client") or ("unknown",))[0])


async def on_http_exception(form_at: Callable[[str], ErrorForm], request: Request, error: Exception) -> Response:
    """Answers what starlette refuses: unknown paths and methods. `form_at`: the form of errors at a path."""
    assert isinstance(error, HTTPException)
    path, status = request.url.path, error.status_code
    allowed = (error.headers or {}).get("Allow")
    problem = f"the method there is {allowed}" if allowed else "is not served here; GET /openapi.json lists what is"
    body = ErrorBody(f"{request.method} {path}: {problem}", "invalid_request_error")
    return json_response(form_at(path)(status, body, ""), status, error.headers)


def _status_of_refusal(error: InvalidRequestError) -> tuple[int, str | None]:
    match error:
        case UnknownModelError():
            return 404, "model_not_found"
        case ContextLengthError():
            return 400, "context_length_exceeded"
        case BodyTooLargeError():
            return 413, "body_too_large"
    return 400, None
