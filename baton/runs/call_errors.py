"""Converts a failed call to one of Baton's own errors, in the service's words."""

from typing import TypeVar

import grpc

from runtime.errors import (
    BatonError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    UnauthorizedError,
    UnavailableError,
)

RETRY_AFTER = "retry-after-ms"
API_KEY_REMEDY = "; give it with --api-key-file or BATON_API_KEY, in Python as api_key"

E = TypeVar("E", bound=BatonError)


def error_of(error: grpc.aio.AioRpcError, place: str, timeout_s: float | None) -> BatonError:
    """`place`: HOST:PORT that was asked. `timeout_s`: the caller's deadline."""
    words = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.NOT_FOUND | grpc.StatusCode.OUT_OF_RANGE:
            field, _, problem = words.partition(": ")
            return _worded(InvalidRequestError(field, problem), words)
        case grpc.StatusCode.UNAUTHENTICATED:
            return UnauthorizedError(place, words + API_KEY_REMEDY * ("API key" in words))
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            waits = [value for name, value in error.trailing_metadata() or () if name == RETRY_AFTER]
            if not waits:  # gRPC itself refuses a message for its size
                return InvalidRequestError("request", words)
            return _worded(OverloadedError("service", 0, float(waits[0]) / 1000), words)
        case grpc.StatusCode.UNAVAILABLE:
            return UnavailableError(words)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            late = DeadlineError(f"the answer of {place}", timeout_s or 0.0)
            return late if timeout_s else _worded(late, words)
        case grpc.StatusCode.UNIMPLEMENTED:
            return BatonError(f"the router at {place} is older than this program and cannot answer it")
    return BatonError(words)


def _worded(error: E, words: str) -> E:
    error.args = (words,)
    return error
