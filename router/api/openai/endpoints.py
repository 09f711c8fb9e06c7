"""`POST /v1/chat/completions` and `POST /v1/completions`."""

from router.api.dialects.tolerant import tolerant
from router.api.openai.answers import OpenAIDialect
from router.api.openai.chat import ChatAnswer, ChatCompletion
from router.api.openai.completions import Completion, CompletionAnswer
from router.api.openai.types import ChatBody, CompletionBody
from router.requests.frontend import Models

DESCRIBED = {
    "/v1/chat/completions": ("A chat's next message; streamed as server-sent events", ChatBody, ChatCompletion),
    "/v1/completions": ("The text after a prompt; streamed likewise", CompletionBody, Completion),
}


def chats(models: Models, _: object) -> OpenAIDialect:
    body = ChatBody if models.config.unknown_fields == "refuse" else tolerant(ChatBody)
    return OpenAIDialect(body, ChatAnswer, "chatcmpl")


def completions(models: Models, _: object) -> OpenAIDialect:
    body = CompletionBody if models.config.unknown_fields == "refuse" else tolerant(CompletionBody)
    return OpenAIDialect(body, CompletionAnswer, "cmpl")
