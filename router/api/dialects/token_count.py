"""Counts the tokens that a chat's prompt would have, in whatever dialect."""

from collections.abc import Callable

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from router.api.dialects.json_body import read_soon
from router.api.dialects.plain_request import answer_plain
from router.api.http.errors import ErrorForm
from router.api.http.json_response import json_response
from router.api.wishes.tool_use import check_tools
from router.api.wishes.validation import Chat, tokenize
from router.requests.frontend import Models

Read = Callable[[bytes, str], tuple[str | None, Chat]]
"""(body, tenant) -> (model, chat), on any thread. Raises InvalidRequestError."""


async def count_tokens(
    models: Models, http: Request, field: str, read: Read, answer: Callable[[int], Struct], form: ErrorForm
) -> Response:
    """`field`: the body's name of the prompt; `answer`: makes an answer of the number."""

    async def reply(data: bytes, tenant: str, deadline_s: float) -> Response:
        model, chat = await read_soon(models.lane, deadline_s, read, data, tenant)
        frontend = models.of(model)
        if chat.tools is not None:
            check_tools(chat.tools, frontend.families)
        tokens = await tokenize(frontend, chat, field, deadline_s)
        return json_response(answer(len(tokens)))

    return await answer_plain(models, http, reply, form)
