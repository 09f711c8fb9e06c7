"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

import time
from collections.abc import Sequence

from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from router.api.http.body import BodyBudget, received_body
from router.api.http.dialect import Asked
from router.api.http.errors import ErrorBody, error_response
from router.api.http.generation import CALLER
from router.api.http.json_body import decode_body, read_soon, refuse_not_served
from router.api.http.json_response import json_response
from router.api.messages.answer import MessageAnswer, error_answer
from router.api.messages.fields import CountBody, MessagesBody, OpenCountBody, OpenMessagesBody
from router.api.messages.output import Message, MessageUsage, TokenCount
from router.api.sampling_options import Options
from router.api.tool_use import check_tools
from router.api.validation import Chat, Prompt, check_model, make_request_id, tokenize
from router.requests.frontend import Frontend
from router.requests.request import GenerateRequest
from runtime.security.callers import ANYONE

PATH = "/v1/messages"


class MessagesDialect:
    named_events = True

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._bodies = BodyBudget(frontend.max_buffered_bytes)
        strict = frontend.unknown_fields == "refuse"
        self._body = MessagesBody if strict else OpenMessagesBody
        self._count_body = CountBody if strict else OpenCountBody

    def read(self, data: bytes, tenant: str) -> tuple[Asked, Options, Sequence[Prompt]]:
        """Raises InvalidRequestError."""
        body = decode_body(data, self._body)
        refuse_not_served(body, body.not_served)
        return body.asked("messages", body.keep_s(), None), body.options(), [body.chat()]

    def answer(
        self, asked: Asked, options: Options, request_id: str, tenant: str, requests: Sequence[GenerateRequest]
    ) -> MessageAnswer:
        usage = MessageUsage(input_tokens=len(requests[0].prompt), output_tokens=0)
        return MessageAnswer(Message(id=f"msg_{request_id}", model=self._frontend.model, usage=usage), request_id)

    def error(self, status: int, error: ErrorBody, request_id: str) -> Struct:
        return error_answer(status, error, request_id)

    def routes(self) -> list[Route]:
        return [Route(f"{PATH}/count_tokens", self._count, methods=["POST"])]

    async def _count(self, http: Request) -> HttpResponse:
        shown_id, _ = make_request_id(None)
        frontend = self._frontend
        try:
            frontend.rate_limits.account(http.scope.get(CALLER, ANYONE)).admit()
            deadline_s = time.monotonic() + frontend.request_timeout_s
            with self._bodies.hold() as held:
                data = await received_body(http, frontend.max_body_bytes, held)
                model, chat = await read_soon(frontend.lane, deadline_s, _counted, data, self._count_body)
                check_model(frontend, model)
                if chat.tools is not None:
                    check_tools(chat.tools, frontend.families, frontend.tokenizer)
                return json_response(TokenCount(len(await tokenize(frontend, chat, "messages", deadline_s))))
        except ClientDisconnect:
            raise
        except Exception as error:
            return error_response(error, shown_id, error_answer)


def _counted(data: bytes, kind: type[CountBody]) -> tuple[str | None, Chat]:
    """Raises InvalidRequestError."""
    body = decode_body(data, kind)
    refuse_not_served(body, body.not_served)
    return body.model, body.chat()
