"""JSON answers over HTTP, encoded by msgspec."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

import msgspec
from msgspec import Raw, Struct
from starlette.responses import Response

RETRY_AFTER: Final = "retry-after"  # seconds
SLICE: Final = 8192  # elements of a list, or characters: they take up to 1 ms, in which no other thread runs

encode_json = msgspec.json.Encoder().encode


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Every 503 says when to come back."""
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers = {RETRY_AFTER: "1"} | dict(headers or {})
    return Response(encode_json(body), status, headers, media_type="application/json")


def encode_in_slices(answer: Struct) -> bytes:
    """Encodes as encode_json does. Other threads run between two slices of a long list or text."""
    return encode_json({name: _in_slices(value) for name, value in msgspec.structs.asdict(answer).items()})


def _in_slices(value: object) -> object:
    if not isinstance(value, str | list) or len(value) <= SLICE:
        return value
    opening, separator, closing = (b'"', b"", b'"') if isinstance(value, str) else (b"[", b",", b"]")
    parts = [encode_json(value[start : start + SLICE])[1:-1] for start in range(0, len(value), SLICE)]
    return Raw(opening + separator.join(parts) + closing)
