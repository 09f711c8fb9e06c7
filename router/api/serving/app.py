"""The router's HTTP application: the OpenAI-compatible API, health and metrics."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from types import MappingProxyType
from typing import Any

import prometheus_client
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.dialects.dialect import Dialect
from router.api.dialects.generation import CALLER, REQUEST_ID_HEADER, GenerationEndpoint
from router.api.http.connection import KNOWN
from router.api.http.errors import (
    API_KEY,
    ErrorForm,
    client_of,
    error_response,
    on_http_exception,
    openai_form,
    unauthorized,
)
from router.api.http.json_response import json_response
from router.api.http.web_pages import WebPages
from router.api.openai.answers import OpenAIDialect
from router.api.openai.chat import ChatAnswer
from router.api.openai.completions import CompletionAnswer
from router.api.openai.types import ChatBody, CompletionBody, OpenChatBody, OpenCompletionBody
from router.api.wishes.validation import make_request_id
from router.requests.frontend import Frontend
from runtime.errors import UnknownModelError
from runtime.security.bearer_keys import BearerKeys
from runtime.security.callers import ANYONE
from runtime.security.failed_logins import FailedLogins

OPEN_PATHS = ("/health", "/ready", "/ping")  # for whoever checks that the router lives, without a key

Targets = Callable[[], Awaitable[object]]
Around = Callable[[str, ASGIApp], ASGIApp]
NO_DIALECTS: Mapping[str, Dialect] = MappingProxyType({})


async def _no_targets() -> object:
    return []


def create_app(
    frontend: Frontend,
    metrics: Callable[[], bytes],
    targets: Targets = _no_targets,
    keys: BearerKeys | None = None,
    operators_routes: Sequence[Route] = (),
    more_routes: Sequence[Route] = (),
    cors_origins: Sequence[str] = (),
    dialects: Mapping[str, Dialect] = NO_DIALECTS,
    around: Around | None = None,
    pages: WebPages | None = None,
    logins: FailedLogins | None = None,
) -> ASGIApp:
    """`metrics` returns the Prometheus text of this process, `targets` the addresses of every process's. With `keys`,
    every path but OPEN_PATHS and those of `operators_routes`, which ask for another one by themselves, asks for one of
    them. `cors_origins`: of web pages that browsers let call this API. `dialects`: path -> what is said there, besides
    OpenAI's chats and completions. `around` is put around the endpoint of each path where text is asked for. `pages`
    says what web pages may ask; None: all. `logins` is told of wrong keys.

    Requests for text go straight to their endpoints, which answer their own errors, because each layer between would
    cost time for every event.
    """
    strict = frontend.unknown_fields == "refuse"
    chat, completion = (ChatBody, CompletionBody) if strict else (OpenChatBody, OpenCompletionBody)
    spoken: dict[str, Dialect] = {
        "/v1/chat/completions": OpenAIDialect(frontend, chat, ChatAnswer, "chatcmpl"),
        "/v1/completions": OpenAIDialect(frontend, completion, CompletionAnswer, "cmpl"),
        **dialects,
    }
    endpoints: dict[str, ASGIApp] = {path: GenerationEndpoint(frontend, dialect) for path, dialect in spoken.items()}
    direct = endpoints if around is None else {path: around(path, endpoint) for path, endpoint in endpoints.items()}
    plain = _Pages(frontend, metrics, targets)
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()),
        Route("/v1/models", plain.list_models),
        Route("/v1/models/{model:path}", plain.retrieve_model),
        Route("/health", plain.health),
        Route("/ping", plain.health, methods=["GET", "POST"]),
        Route("/ready", plain.ready),
        Route("/metrics", plain.metrics),
        Route("/metrics/targets", plain.list_targets),
        *more_routes,
        *operators_routes,
    ]
    form_at = partial(_form_at, dialects)
    refused = partial(on_http_exception, form_at)
    others = Starlette(routes=routes, exception_handlers={HTTPException: refused})

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if keys is None:
            scope[KNOWN] = True
        endpoint: ASGIApp | None = direct.get(scope["path"]) if scope.get("method") == "POST" else None
        await (endpoint or others)(scope, receive, send)

    unguarded = (*OPEN_PATHS, *(route.path.partition("{")[0] for route in operators_routes))
    guarded = app if keys is None else _guarded(app, keys, unguarded, form_at, logins or FailedLogins())
    told = guarded if not cors_origins else _from_web_pages(guarded, cors_origins)
    return told if pages is None else pages.around(told, form_at)


def _form_at(dialects: Mapping[str, Dialect], path: str) -> ErrorForm:
    """A path that begins with that of a dialect has the dialect's form of errors."""
    return next((spoken.error for begin, spoken in dialects.items() if path.startswith(begin)), openai_form)


def _guarded(
    app: ASGIApp,
    keys: BearerKeys,
    unguarded: Sequence[str],
    form_at: Callable[[str], ErrorForm],
    logins: FailedLogins,
) -> ASGIApp:
    """`unguarded`: paths, and beginnings of paths that end with a slash."""
    prefixes = tuple(path for path in unguarded if path.endswith("/"))

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        shown = _shown_key(scope)
        caller = keys.caller(shown or b"")
        if caller is not None or scope["path"] in unguarded or scope["path"].startswith(prefixes):
            scope[CALLER] = caller or ANYONE
            if caller is not None:
                scope[KNOWN] = True
            await app(scope, receive, send)
        else:
            if shown is not None:
                await asyncio.sleep(logins.failed("http", API_KEY, client_of(scope)))
            await unauthorized(given=shown is not None, form=form_at(scope["path"]))(scope, receive, send)

    return guarded


def _shown_key(scope: Scope) -> bytes | None:
    """Of `authorization: Bearer KEY`, or of `x-api-key: KEY`, which Anthropic's clients send."""
    shown = dict(scope["headers"])
    key = shown.get(b"x-api-key")
    return shown.get(b"authorization", None if key is None else b"Bearer " + key)


def _from_web_pages(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """A browser's preflight request has no key, so this stands before the keys."""
    exposed = (REQUEST_ID_HEADER, "retry-after")
    methods = ("GET", "POST")
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=methods, allow_headers=["*"], expose_headers=exposed
    )


class _Pages:
    """All that is not a request for text."""

    def __init__(self, frontend: Frontend, metrics: Callable[[], bytes], targets: Targets) -> None:
        self._frontend = frontend
        self._metrics = metrics
        self._targets = targets

    async def list_models(self, request: Request) -> Response:
        model = self._model(request)
        ids = {"first_id": model["id"], "last_id": model["id"], "has_more": False} if "type" in model else {}
        return json_response({"object": "list", "data": [model], **ids})

    async def retrieve_model(self, request: Request) -> Response:
        wanted, served = request.path_params["model"], self._frontend.model
        if wanted != served:
            return error_response(UnknownModelError(wanted, [served]), make_request_id(None)[0])
        return json_response(self._model(request))

    async def health(self, request: Request) -> Response:
        """The process lives."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """A request that came now would be served."""
        problem = self._frontend.not_ready()
        return json_response({"status": problem or "ready"}, 200 if problem is None else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics(), headers={"content-type": prometheus_client.CONTENT_TYPE_LATEST})

    async def list_targets(self, request: Request) -> Response:
        return json_response(await self._targets())

    def _model(self, request: Request) -> dict[str, Any]:
        """For OpenAI's clients and, with more fields, for Anthropic's."""
        fields: dict[str, Any] = {
            "id": self._frontend.model,
            "object": "model",
            "created": self._frontend.created_s,
            "owned_by": "baton",
            "max_model_len": self._frontend.generator.limits().max_model_len,
        }
        if "anthropic-version" in request.headers:
            created_at = datetime.fromtimestamp(fields["created"], UTC).isoformat()
            fields |= {"type": "model", "display_name": fields["id"], "created_at": created_at}
        return fields
