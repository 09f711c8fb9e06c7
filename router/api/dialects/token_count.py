"""How many tokens the prompt of a chat would have, over whatever protocol."""

import time
from collections.abc import Callable

from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from router.api.dialects.generation import CALLER, enter_tenant
from router.api.dialects.json_body import read_soon
from router.api.http.body import received_body
from router.api.http.disconnect import NOBODY, until_disconnect
from router.api.http.errors import ErrorForm, error_response
from router.api.http.json_response import json_response
from router.api.wishes.tool_use import check_tools
from router.api.wishes.validation import Chat, check_model, make_request_id, tokenize
from router.requests.frontend import Frontend
from runtime.security.callers import ANYONE

Read = Callable[[bytes, str], tuple[str | None, Chat]]
"""(body, tenant) -> (model, chat), on any thread. Raises InvalidRequestError."""


class TokenCounter:
    def __init__(
        self, frontend: Frontend, field: str, read: Read, answer: Callable[[int], Struct], form: ErrorForm
    ) -> None:
        """`field`: the body's name of the prompt; `answer`: makes an answer of the number."""
        self._frontend = frontend
        self._field = field
        self._read = read
        self._answer = answer
        self._form = form

    async def count(self, http: Request) -> Response:
        """The endpoint."""
        frontend = self._frontend
        try:
            frontend.rate_limits.account(http.scope.get(CALLER, ANYONE)).admit()
            tenant = enter_tenant(http)
            with frontend.bodies.hold(tenant) as held:
                data = await received_body(http, frontend.max_body_bytes, held)
                return await until_disconnect(http.receive, self._counted(data, tenant))
        except ClientDisconnect:
            return NOBODY
        except Exception as error:
            return error_response(error, make_request_id(None)[0], self._form)

    async def _counted(self, data: bytes, tenant: str) -> Response:
        frontend = self._frontend
        deadline_s = time.monotonic() + frontend.request_timeout_s
        model, chat = await read_soon(frontend.lane, deadline_s, self._read, data, tenant)
        check_model(frontend, model)
        if chat.tools is not None:
            check_tools(chat.tools, frontend.families)
        tokens = await tokenize(frontend, chat, self._field, deadline_s)
        return json_response(self._answer(len(tokens)))
