"""Who may call what operators call over HTTP."""

from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response

from router.api.http.connection import KNOWN
from router.api.http.errors import error_response, unauthorized
from router.api.validation import make_request_id
from runtime.errors import BatonError
from runtime.security.bearer_keys import BearerKeys
from runtime.security.secret import Secret

Endpoint = Callable[[Request], Awaitable[Response]]


class OperatorsGuard:
    """Asks for one of the operators' keys, as `baton.v1.Admin` does."""

    def __init__(self, operators: Sequence[Secret]) -> None:
        self._keys = BearerKeys.plain(operators)

    def refusal(self, http: Request) -> Response | None:
        """None: the caller may go on."""
        shown = http.headers.get("authorization")
        if self._keys.accepts((shown or "").encode("latin-1")):
            http.scope[KNOWN] = True
            return None
        return unauthorized(shown is not None, "operator key")

    def guarded(self, answer: Endpoint) -> Endpoint:
        """The same endpoint behind the key. A BatonError of it becomes an answer."""

        async def endpoint(http: Request) -> Response:
            if (refusal := self.refusal(http)) is not None:
                return refusal
            try:
                return await answer(http)
            except BatonError as error:
                return error_response(error, make_request_id(None)[0])

        return endpoint
