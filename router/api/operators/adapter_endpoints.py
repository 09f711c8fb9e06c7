"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM names them: at all workers, or at `?worker=`; of
several models at those of `?model=`.

Answers are `{"workers": [...]}`, one row per worker; with status 503 when a row has a `problem`.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.dialects.json_body import decode_body
from router.api.http.body import received_body
from router.api.http.json_response import json_response
from router.api.operators.guard import OperatorsGuard
from router.requests.body_budget import BodyBudget
from router.views.adapters_control import AdaptersControl, Row

MAX_BODY_BYTES = 64 * 1024


class Load(Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_path: str  # a folder on the worker's machine, or on that of its server


class Unload(Struct, forbid_unknown_fields=True):
    lora_name: str


class AdapterEndpoints:
    def __init__(self, of_model: Callable[[str], AdaptersControl], guard: OperatorsGuard) -> None:
        """`of_model`: of the one that is named; it raises InvalidRequestError."""
        self._of_model = of_model
        self._guarded = guard.guarded

    def routes(self) -> list[Route]:
        return [
            Route("/v1/load_lora_adapter", self._guarded(self._load), methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._guarded(self._unload), methods=["POST"]),
        ]

    async def _load(self, http: Request) -> Response:
        body = decode_body(await _body(http), Load)
        control, worker = self._asked(http)
        return _answer(await control.load(body.lora_name, body.lora_path, worker))

    async def _unload(self, http: Request) -> Response:
        body = decode_body(await _body(http), Unload)
        control, worker = self._asked(http)
        return _answer(await control.unload(body.lora_name, worker))

    def _asked(self, http: Request) -> tuple[AdaptersControl, str]:
        query = http.query_params
        return self._of_model(query.get("model", "")), query.get("worker", "")


async def _body(http: Request) -> bytes:
    """Raises BodyTooLargeError and InvalidRequestError."""
    with BodyBudget(MAX_BODY_BYTES).hold() as held:
        return await received_body(http, MAX_BODY_BYTES, held)


def _answer(rows: Sequence[Row]) -> Response:
    return json_response({"workers": rows}, 503 if any(row.problem for row in rows) else 200)
