"""The dialects of HTTP: a row each. A dialect's module is imported when somebody first asks in it."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.dialects.dialect import Dialect
from router.api.http.errors import ErrorForm, openai_form
from router.api.pages.openapi import Described
from router.api.responses.store import ResponseStore
from router.requests.frontend import Frontend


class Row(NamedTuple):
    module: str
    make: str  # what there makes the dialect, of a Frontend and a ResponseStore
    more: Sequence[tuple[str, str, str]] = ()  # (what follows the path, HTTP method, method of the dialect)


SPOKEN: Mapping[str, Row] = {
    "/v1/chat/completions": Row("router.api.openai.endpoints", "chats"),
    "/v1/completions": Row("router.api.openai.endpoints", "completions"),
    "/v1/responses": Row(
        "router.api.responses.endpoints",
        "ResponsesDialect",
        (
            ("/input_tokens", "POST", "count"),
            ("/{response_id}", "GET", "retrieve"),
            ("/{response_id}", "DELETE", "delete"),
        ),
    ),
    "/v1/messages": Row("router.api.messages.endpoints", "MessagesDialect", (("/count_tokens", "POST", "count"),)),
}

Spoken = Mapping[str, Callable[[], Dialect]]
"""Path -> the dialect that is spoken there."""


def spoken(frontend: Frontend, store: ResponseStore) -> Spoken:
    return {path: cache(partial(_make, row, frontend, store)) for path, row in SPOKEN.items()}


def more_routes(dialects: Spoken) -> list[Route]:
    """The routes of the dialects that do not ask for text."""
    return [
        Route(f"{path}{behind}", partial(_ask, dialects[path], method), methods=[verb])
        for path, row in SPOKEN.items()
        for behind, verb, method in row.more
    ]


def form_at(dialects: Spoken, path: str) -> ErrorForm:
    """A path that begins with that of a dialect has the dialect's form of errors."""
    return next((dialect().error for begin, dialect in dialects.items() if path.startswith(begin)), openai_form)


def described() -> Mapping[str, Described]:
    """Every path where a body is sent."""
    modules = dict.fromkeys(row.module for row in SPOKEN.values())
    return {path: told for module in modules for path, told in import_module(module).DESCRIBED.items()}


def _make(row: Row, frontend: Frontend, store: ResponseStore) -> Dialect:
    dialect: Dialect = getattr(import_module(row.module), row.make)(frontend, store)
    return dialect


async def _ask(dialect: Callable[[], Any], method: str, http: Request) -> Response:
    response: Response = await getattr(dialect(), method)(http)
    return response
