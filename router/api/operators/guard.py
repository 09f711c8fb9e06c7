"""Lets operators in over HTTP by the key that they show."""

from collections.abc import Awaitable, Callable, Sequence

import structlog
from starlette.requests import Request
from starlette.responses import Response

from router.api.http.connection import KNOWN
from router.api.http.errors import error_response
from router.api.http.key_guard import unauthorized
from router.api.wishes.validation import make_request_id
from runtime.errors import BatonError
from runtime.security.bearer_keys import BearerKeys
from runtime.security.failed_logins import OPERATOR_KEY, FailedLogins
from runtime.security.secret import Secret

log = structlog.get_logger()

Endpoint = Callable[[Request], Awaitable[Response]]


class OperatorsGuard:
    """Asks for one of the operators' keys, as `baton.v1.Admin` does."""

    def __init__(self, operators: Sequence[Secret], logins: FailedLogins | None = None) -> None:
        self._keys = BearerKeys.plain(operators)
        self._logins = logins or FailedLogins()

    async def refusal(self, http: Request) -> Response | None:
        """The refusal of a caller without an operator's key; None: the caller may go on. Requests that change something
        are logged with the name of the key."""
        shown = http.headers.get("authorization")
        caller = self._keys.caller((shown or "").encode("latin-1"))
        if caller is not None:
            http.scope[KNOWN] = True
            if http.method == "POST":
                log.info("an operator asks", what=http.url.path, query=http.url.query[:200], by=caller.key)
            return None
        return await unauthorized(http.scope, shown is not None, OPERATOR_KEY, self._logins)

    def guarded(self, answer: Endpoint) -> Endpoint:
        """Puts the endpoint behind the key. A BatonError of it becomes an answer."""

        async def endpoint(http: Request) -> Response:
            if (refusal := await self.refusal(http)) is not None:
                return refusal
            try:
                return await answer(http)
            except BatonError as error:
                return error_response(error, make_request_id(None)[0])

        return endpoint
