"""The dialects of HTTP: a row each. All are loaded before the router is ready, because an import that comes with a
request keeps all others waiting."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.dialects.dialect import Dialect
from router.api.http.errors import ErrorForm, openai_form
from router.api.messages import endpoints as messages
from router.api.openai import endpoints as openai
from router.api.pages.openapi import Described
from router.api.pooled import endpoints as pooled
from router.api.responses import endpoints as responses
from router.api.responses.store import ResponseStore
from router.requests.frontend import Models


class Row(NamedTuple):
    make: Callable[[Models, ResponseStore], Dialect]
    described: Mapping[str, tuple[str, Any, Any]]
    more: Sequence[tuple[str, str, str]] = ()  # (what follows the path, HTTP method, method of the dialect)


_POOLED = {
    ("/v1/embeddings",): (pooled.EMBEDDINGS, pooled.DESCRIBED_EMBEDDINGS),
    ("/v1/score", "/score"): (pooled.SCORE, pooled.DESCRIBED_SCORE),
    ("/v1/rerank", "/rerank", "/v2/rerank"): (pooled.RERANK, pooled.DESCRIBED_RERANK),
}
SPOKEN: Mapping[str, Row] = {
    "/v1/chat/completions": Row(openai.chats, openai.DESCRIBED),
    "/v1/completions": Row(openai.completions, openai.DESCRIBED),
    "/v1/responses": Row(
        responses.ResponsesDialect,
        responses.DESCRIBED,
        (
            ("/input_tokens", "POST", "count"),
            ("/{response_id}", "GET", "retrieve"),
            ("/{response_id}", "DELETE", "delete"),
        ),
    ),
    "/v1/messages": Row(
        messages.MessagesDialect,
        messages.DESCRIBED,
        (("/count_tokens", "POST", "count"),),
    ),
    **{path: Row(make, {path: told}) for paths, (make, told) in _POOLED.items() for path in paths},
}

Spoken = Mapping[str, Dialect]
"""Path -> the dialect that is spoken there."""


def spoken(models: Models, store: ResponseStore) -> Spoken:
    return {path: row.make(models, store) for path, row in SPOKEN.items()}


def more_routes(dialects: Spoken) -> list[Route]:
    """The routes of the dialects that do not ask for text."""
    return [
        Route(f"{path}{behind}", partial(_ask, dialects[path], method), methods=[verb])
        for path, row in SPOKEN.items()
        for behind, verb, method in row.more
    ]


def form_at(dialects: Spoken, path: str) -> ErrorForm:
    """A path that begins with that of a dialect has the dialect's form of errors."""
    return next((dialect.error for begin, dialect in dialects.items() if path.startswith(begin)), openai_form)


def described() -> Mapping[str, Described]:
    """Every path where a body is sent."""
    return {path: told for row in SPOKEN.values() for path, told in row.described.items()}


async def _ask(dialect: Any, method: str, http: Request) -> Response:
    response: Response = await getattr(dialect, method)(http)
    return response
