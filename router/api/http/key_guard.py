"""Lets callers over HTTP in by the key that they show."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.http.connection import KNOWN
from router.api.http.errors import ErrorBody, ErrorForm, client_of, openai_form
from router.api.http.json_response import json_response
from runtime.security.bearer_keys import BearerKeys
from runtime.security.callers import ANYONE
from runtime.security.failed_logins import API_KEY, FailedLogins

CALLER: Final = "baton.caller"  # who shows the key of a request; a key of its scope


def guarded(
    app: ASGIApp,
    keys: BearerKeys,
    unguarded: Sequence[str],
    form_at: Callable[[str], ErrorForm],
    logins: FailedLogins,
) -> ASGIApp:
    """`unguarded`: paths, and beginnings of paths that end with a slash. `form_at`: the form of errors at a path."""
    prefixes = tuple(path for path in unguarded if path.endswith("/"))

    async def asks_for_key(scope: Scope, receive: Receive, send: Send) -> None:
        shown, path = _shown_key(scope), scope["path"]
        caller = keys.caller(shown or b"")
        if caller is None and path not in unguarded and not path.startswith(prefixes):
            await (await unauthorized(scope, shown is not None, API_KEY, logins, form_at(path)))(scope, receive, send)
            return
        scope[CALLER] = caller or ANYONE
        if caller is not None:
            scope[KNOWN] = True
        await app(scope, receive, send)

    return asks_for_key


def _shown_key(scope: Scope) -> bytes | None:
    """The value of `authorization: Bearer KEY`, or of `x-api-key: KEY`, which Anthropic's clients send."""
    shown = dict(scope["headers"])
    key = shown.get(b"x-api-key")
    return shown.get(b"authorization", None if key is None else b"Bearer " + key)


async def unauthorized(
    scope: Scope, given: bool, key: str, logins: FailedLogins, form: ErrorForm = openai_form
) -> Response:
    """The answer to a missing key or, `given`, a wrong one, which waits where there are many. `key`: its kind."""
    if given:
        await asyncio.sleep(logins.failed("http", key, client_of(scope)))
    problem = f"this is not the {key} of this service" if given else f"the {key} is missing"
    code = f"invalid_{key.lower().replace(' ', '_')}"
    body = ErrorBody(f"{problem}: Authorization: Bearer KEY", "invalid_request_error", code=code)
    return json_response(form(401, body, ""), 401, {"www-authenticate": "Bearer"})
