"""JSON answers over HTTP, encoded by msgspec."""

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

encode_json = msgspec.json.Encoder().encode


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_json(body), status, headers, media_type="application/json")
