"""The router's HTTP application: the dialects, pages, health and metrics."""

from collections.abc import Callable, Sequence
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.batches.endpoints import DESCRIBED as BATCHES_DESCRIBED
from router.api.batches.service import BatchService
from router.api.dialects.generation import REQUEST_ID_HEADER, GenerationEndpoint
from router.api.http.connection import KNOWN
from router.api.http.errors import on_http_exception
from router.api.http.json_response import RETRY_AFTER
from router.api.http.key_guard import guarded
from router.api.http.web_pages import WebPages
from router.api.pages.openapi import openapi_routes
from router.api.pages.service import Metrics, ServicePages, Targets, no_targets
from router.api.pages.tokenization import DESCRIBED, TokenizationEndpoints
from router.api.responses.store import ResponseStore
from router.api.serving.spoken import described, form_at, more_routes, spoken
from router.requests.frontend import Frontend, Models
from runtime.security.bearer_keys import BearerKeys
from runtime.security.failed_logins import FailedLogins

OPEN_PATHS = ("/health", "/ready", "/ping")  # for whoever checks that the router lives, without a key

Around = Callable[[str, ASGIApp], ASGIApp]


def create_app(
    frontend: Frontend,
    metrics: Metrics,
    targets: Targets = no_targets,
    keys: BearerKeys | None = None,
    operators_routes: Sequence[Route] = (),
    around: Around | None = None,
    pages: WebPages | None = None,
    logins: FailedLogins | None = None,
    store: ResponseStore | None = None,
    others: Sequence[Frontend] = (),
    batches: BatchService | None = None,
) -> ASGIApp:
    """`metrics` returns the text for Prometheus, `targets` the addresses of every process's. With `keys`,
    every path but OPEN_PATHS and those of `operators_routes`, which ask for another one by themselves, asks for one of
    them. `around` is put around the endpoint of each path where text is asked for. `pages` says what web pages may ask;
    None: all. `logins` is told of wrong keys. `store` keeps responses; None: none are kept. `others`: further models.
    `batches`: files, and the batches of requests in them; None: a router without a folder for them.

    Requests for text go straight to their endpoints, which answer their own errors, because each layer between would
    cost time for every event.
    """
    models = Models((frontend, *others))
    batches = batches or BatchService(models, None, keys, lambda lines: 0.0)
    dialects = spoken(models, store or ResponseStore(0, 0.0))
    endpoints: dict[str, ASGIApp] = {path: GenerationEndpoint(models, each) for path, each in dialects.items()}
    direct = endpoints if around is None else {path: around(path, endpoint) for path, endpoint in endpoints.items()}
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()),
        *ServicePages(models, metrics, targets).routes(),
        *TokenizationEndpoints(models).routes(),
        *openapi_routes(lambda: {**described(), **DESCRIBED, **BATCHES_DESCRIBED}),
        *batches.routes(),
        *more_routes(dialects),
        *operators_routes,
    ]
    form = partial(form_at, dialects)
    rest = Starlette(routes=routes, exception_handlers={HTTPException: partial(on_http_exception, form)})

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if keys is None:
            scope[KNOWN] = True
        endpoint: ASGIApp | None = direct.get(scope["path"]) if scope.get("method") == "POST" else None
        await (endpoint or rest)(scope, receive, send)

    batches.begin(app, [route.path for route in routes])
    unguarded = (*OPEN_PATHS, *(route.path.partition("{")[0] for route in operators_routes))
    told: ASGIApp = app if keys is None else guarded(app, keys, unguarded, form, logins or FailedLogins())
    if pages is None:
        return told
    if pages.origins:  # a browser's preflight request has no key, so this stands before the keys
        exposed = (REQUEST_ID_HEADER, RETRY_AFTER)
        methods = ("GET", "POST")
        told = CORSMiddleware(
            told, allow_origins=pages.origins, allow_methods=methods, allow_headers=["*"], expose_headers=exposed
        )
    return pages.around(told, form)
