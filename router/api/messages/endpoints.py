"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from collections.abc import Sequence

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from router.api.dialects.dialect import Asked, Dialect
from router.api.dialects.json_body import decode_body
from router.api.dialects.token_count import count_tokens
from router.api.dialects.tolerant import tolerant
from router.api.http.errors import ErrorBody
from router.api.messages.answer import MessageAnswer, error_answer
from router.api.messages.fields import CountBody, MessagesBody
from router.api.messages.output import Message, MessageUsage, TokenCount
from router.api.wishes.sampling_options import Options
from router.api.wishes.validation import Chat, Prompt
from router.requests.frontend import Frontend, Models
from router.requests.request import GenerateRequest

DESCRIBED = {
    "/v1/messages": ("Anthropic's Messages API; streamed as named events", MessagesBody, Message),
    "/v1/messages/count_tokens": ("The tokens that a message's prompt would have", CountBody, TokenCount),
}


class MessagesDialect(Dialect):
    named_events = True

    def __init__(self, models: Models, _: object) -> None:
        self._models = models
        strict = models.config.unknown_fields == "refuse"
        self._body = MessagesBody if strict else tolerant(MessagesBody)
        self._count_body = CountBody if strict else tolerant(CountBody)

    def read(self, data: bytes, tenant: str) -> tuple[Asked, Options, Sequence[Prompt]]:
        """Raises InvalidRequestError."""
        body = decode_body(data, self._body)
        return body.asked("messages"), body.options(), [body.chat()]

    def answer(
        self, frontend: Frontend, asked: Asked, options: Options, request_id: str, requests: Sequence[GenerateRequest]
    ) -> MessageAnswer:
        room = requests[0].sampling[0].max_tokens
        usage = MessageUsage(input_tokens=len(requests[0].prompt), output_tokens=0)
        message = Message(id=f"msg_{request_id}", model=frontend.model, usage=usage)
        return MessageAnswer(message, request_id, None if room == options.given["max_tokens"] else room)

    def error(self, status: int, error: ErrorBody, request_id: str) -> Struct:
        return error_answer(status, error, request_id)

    async def count(self, http: Request) -> Response:
        return await count_tokens(self._models, http, "messages", self._counted, TokenCount, error_answer)

    def _counted(self, data: bytes, tenant: str) -> tuple[str | None, Chat]:
        body = decode_body(data, self._count_body)
        return body.model, body.chat()
