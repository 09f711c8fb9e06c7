"""The live page at /ui and what it asks for. The page itself is open and holds no secret; all else asks for an operator
key, in a header that the page sets."""

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from importlib import resources
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from router.api.http.connection import DROP
from router.api.http.disconnect import until_disconnect
from router.api.http.errors import ErrorAnswer, ErrorBody
from router.api.http.json_response import json_response
from router.api.http.server_sent_events import ENCODED_HEADERS
from router.api.operators.guard import OperatorsGuard
from router.ui.feed import Feed
from router.ui.parts import PageParts
from router.ui.tree import TreePicture

JSON = "application/json"
UNKNOWN = "this model is not served"
BUSY = "as many viewers as the router takes watch already"


@dataclass(frozen=True, slots=True)
class ModelPage:
    """What the page shows of one model."""

    feed: Feed
    parts: PageParts
    tree: TreePicture


class UiEndpoints:
    def __init__(self, pages: Mapping[str, ModelPage], guard: OperatorsGuard) -> None:
        """`pages`: by model; the first one is shown to who names none (`?model=NAME`)."""
        self._pages = pages
        self._guard = guard
        self._page, self._headers = _page()

    def routes(self) -> list[Route]:
        return [
            Route("/ui", self._show_page),
            Route("/ui/events", _Asgi(self._events), methods=["GET"]),
            Route("/ui/tree", self._guard.guarded(self._show_tree)),
            Route("/ui/requests/{request_id:path}", self._guard.guarded(self._show_request)),
        ]

    async def _show_page(self, request: Request) -> Response:
        return Response(self._page, headers=self._headers)

    def _of(self, request: Request) -> ModelPage | None:
        """Of the model that the request names."""
        return self._pages.get(request.query_params.get("model") or next(iter(self._pages)))

    async def _show_tree(self, request: Request) -> Response:
        page = self._of(request)
        return _refusal(404, UNKNOWN) if page is None else json_response(await page.tree.picture())

    async def _show_request(self, request: Request) -> Response:
        page = self._of(request)
        story = b"" if page is None else await page.parts.story(request.path_params["request_id"])
        return Response(story, media_type=JSON) if story else _refusal(404, "this request is not remembered")

    async def _events(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal, page = await self._guard.refusal(Request(scope)), self._of(Request(scope))
        if refusal is None and page is not None and page.feed.full and not page.feed.make_room():
            refusal = _refusal(503, BUSY)
        if refusal is not None or page is None:
            await (refusal or _refusal(404, UNKNOWN))(scope, receive, send)
            return

        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": ENCODED_HEADERS})
            if scope["method"] != "HEAD":  # which would keep a viewer's place and its connection, and read nothing
                async with aclosing(page.feed.messages(scope.get(DROP, lambda: None))) as messages:
                    async for data in messages:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        with suppress(ClientDisconnect):
            await until_disconnect(receive, write())


class _Asgi:
    """Starlette takes a function for one that returns a response, and any other object for an application."""

    def __init__(self, application: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._application(scope, receive, send)


def _refusal(status: int, problem: str) -> Response:
    return json_response(ErrorAnswer(ErrorBody(problem, "invalid_request_error")), status)


def _page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers. It may run its own script and style, and ask this router; nothing else."""
    page = resources.files("router.ui").joinpath("page.html").read_bytes()
    policy = ["default-src 'none'", "connect-src 'self'", "base-uri 'none'", "form-action 'none'"]
    for name in ("script", "style"):
        hashes = (
            hashlib.sha256(body).digest() for body in re.findall(b"<%b>(.*?)</%b>" % ((name.encode(),) * 2), page, re.S)
        )
        policy.append(" ".join([f"{name}-src", *(f"'sha256-{base64.b64encode(one).decode()}'" for one in hashes)]))
    headers: dict[str, Any] = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": "; ".join([*policy, "frame-ancestors 'none'"]),
        "cache-control": "no-store",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return page, headers
