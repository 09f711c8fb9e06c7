"""The OpenAI-compatible HTTP API of the router, its health and its metrics. Built by router/__main__.py."""

from collections.abc import Awaitable, Callable
from typing import Any

import prometheus_client
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.http.errors import error_response, on_http_exception, unauthorized
from router.api.http.generation import GenerationEndpoint
from router.api.http.json_response import json_response
from router.api.http.openai_chat import ChatAnswer
from router.api.http.openai_completions import CompletionAnswer
from router.api.http.openai_types import ChatBody, CompletionBody
from router.api.validation import make_request_id
from router.requests.frontend import Frontend
from runtime.errors import UnknownModelError
from runtime.security.bearer_keys import BearerKeys

Endpoint = Callable[[Request], Awaitable[Response]]
Targets = Callable[[], Awaitable[object]]

OPEN_PATHS = ("/health", "/ready")  # to those who look whether we live, and have no key


async def _no_targets() -> object:
    return []


def create_app(
    frontend: Frontend,
    metrics: Callable[[], bytes],
    targets: Targets = _no_targets,
    keys: BearerKeys | None = None,
) -> ASGIApp:
    """`metrics` gives the Prometheus text of this process, `targets` where that of every process is; `keys`: all but
    OPEN_PATHS asks for one of them.

    Requests for text go straight to their endpoints, which answer their own errors: each layer between would cost
    something for every event.
    """
    chat = GenerationEndpoint(frontend, ChatBody, ChatAnswer, "chatcmpl")
    completions = GenerationEndpoint(frontend, CompletionBody, CompletionAnswer, "cmpl")
    direct = {"/v1/chat/completions": chat, "/v1/completions": completions}
    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", _list_models(frontend)),
        Route("/v1/models/{model:path}", _retrieve_model(frontend)),
        Route("/health", _health),
        Route("/ready", _ready(frontend)),
        Route("/metrics", _metrics(metrics)),
        Route("/metrics/targets", _metrics_targets(targets)),
    ]
    others = Starlette(routes=routes, exception_handlers={HTTPException: on_http_exception})

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        endpoint: ASGIApp | None = direct.get(scope["path"]) if scope.get("method") == "POST" else None
        await (endpoint or others)(scope, receive, send)

    return app if keys is None else _guarded(app, keys)


def _guarded(app: ASGIApp, keys: BearerKeys) -> ASGIApp:
    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        shown = next((value for name, value in scope["headers"] if name == b"authorization"), None)
        if scope["path"] in OPEN_PATHS or keys.accepts(shown or b""):
            await app(scope, receive, send)
        else:
            await unauthorized(given=shown is not None)(scope, receive, send)

    return guarded


def _list_models(frontend: Frontend) -> Endpoint:
    async def list_models(request: Request) -> Response:
        return json_response({"object": "list", "data": [_model(frontend)]})

    return list_models


def _retrieve_model(frontend: Frontend) -> Endpoint:
    async def retrieve_model(request: Request) -> Response:
        wanted = request.path_params["model"]
        if wanted != frontend.model:
            return error_response(UnknownModelError(wanted, [frontend.model]), make_request_id(None)[0])
        return json_response(_model(frontend))

    return retrieve_model


def _model(frontend: Frontend) -> dict[str, Any]:
    return {
        "id": frontend.model,
        "object": "model",
        "created": frontend.created_s,
        "owned_by": "baton",
        "max_model_len": frontend.generator.limits().max_model_len,
    }


async def _health(request: Request) -> Response:
    """The process lives."""
    return json_response({"status": "ok"})


def _ready(frontend: Frontend) -> Endpoint:
    async def ready(request: Request) -> Response:
        """A request that came now would be served."""
        problem = frontend.not_ready()
        return json_response({"status": "ready"}) if problem is None else json_response({"status": problem}, 503)

    return ready


def _metrics(metrics: Callable[[], bytes]) -> Endpoint:
    async def expose(request: Request) -> Response:
        return Response(metrics(), headers={"content-type": prometheus_client.CONTENT_TYPE_LATEST})

    return expose


def _metrics_targets(targets: Targets) -> Endpoint:
    async def list_targets(request: Request) -> Response:
        return json_response(await targets())

    return list_targets
