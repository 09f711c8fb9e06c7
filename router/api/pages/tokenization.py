"""`POST /tokenize` and `POST /detokenize`, as vLLM has them: the tokens of a prompt, and the text of tokens."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar

from msgspec import Raw, Struct
from starlette.responses import Response
from starlette.routing import Route

from router.api.dialects.json_body import ABSENT, decode_body, read_soon
from router.api.dialects.plain_request import answer_plain
from router.api.http.json_response import encode_in_slices
from router.api.openai.fields import ChatMessage, TextPart
from router.api.openai.types import chat_ending, plain_messages
from router.api.pages.openapi import Described
from router.api.wishes.names import Name
from router.api.wishes.template_variables import template_variables
from router.api.wishes.validation import Chat, Prompt, tokenize
from router.requests.frontend import Models
from router.text.text_encoder import TokenIds
from router.text.tokenizer import Tokenizer
from runtime.errors import InvalidRequestError

IN_PLACE_TOKENS = 1024  # answers about more are made in the side lane


class TokenizeBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `prompt` and `messages`."""

    inner: ClassVar[Mapping[str, type[Struct]]] = {"messages": ChatMessage, "content": TextPart}

    model: Name | None = None
    prompt: str | None = None
    messages: Sequence[ChatMessage] | None = None
    add_special_tokens: bool = True  # of a prompt; a chat has those of its template
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None  # of a chat, as is the next one
    continue_final_message: bool | None = None
    chat_template_kwargs: Raw = ABSENT

    def wanted(self) -> tuple[str, Prompt]:
        """The field's name and the prompt. Raises InvalidRequestError."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("prompt", "and messages: exactly one of the two is needed")
        if self.messages is None:
            return "prompt", self.prompt or ""
        messages, size = plain_messages(self.messages)
        variables = template_variables(self.chat_template_kwargs)
        ending = chat_ending(self.add_generation_prompt, self.continue_final_message)
        size += memoryview(self.chat_template_kwargs).nbytes
        return "messages", Chat(messages, variables, size, ending=ending)


class Tokens(Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None  # the text of each by itself


class DetokenizeBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: Name | None = None
    tokens: list[int]


class Text(Struct, frozen=True):
    prompt: str  # special tokens are spelled out


DESCRIBED: Mapping[str, Described] = {
    "/tokenize": ("The tokens of a prompt or a chat", TokenizeBody, Tokens),
    "/detokenize": ("The text of tokens", DetokenizeBody, Text),
}


class TokenizationEndpoints:
    def __init__(self, models: Models) -> None:
        self._models = models

    def routes(self) -> list[Route]:
        return [
            Route("/tokenize", partial(answer_plain, self._models, reply=self._tokens), methods=["POST"]),
            Route("/detokenize", partial(answer_plain, self._models, reply=self._text), methods=["POST"]),
        ]

    async def _tokens(self, data: bytes, tenant: str, deadline_s: float) -> Response:
        body = await read_soon(self._models.lane, deadline_s, decode_body, data, TokenizeBody)
        frontend = self._models.of(body.model)
        name, prompt = body.wanted()
        tokens = await tokenize(frontend, prompt, name, deadline_s, body.add_special_tokens)
        max_model_len = frontend.generator.limits().max_model_len
        spelled = partial(_spelled, frontend.tokenizer, tokens, body.return_token_strs, max_model_len)
        return await self._soon(len(tokens), deadline_s, spelled)

    async def _text(self, data: bytes, tenant: str, deadline_s: float) -> Response:
        body = await read_soon(self._models.lane, deadline_s, decode_body, data, DetokenizeBody)
        frontend = self._models.of(body.model)
        await tokenize(frontend, body.tokens, "tokens", deadline_s)  # none is outside the vocabulary
        return await self._soon(len(body.tokens), deadline_s, partial(_decoded, frontend.tokenizer, body.tokens))

    async def _soon(self, num_tokens: int, deadline_s: float, answer: Callable[[], bytes]) -> Response:
        """An answer about few tokens at once, one about many in the lane."""
        answered = answer() if num_tokens <= IN_PLACE_TOKENS else await self._models.lane.run(deadline_s, answer)
        return Response(answered, media_type="application/json")


def _spelled(tokenizer: Tokenizer, tokens: TokenIds, each: bool, max_model_len: int) -> bytes:
    token_ids = tokens.tolist()
    texts = list(map(tokenizer.token_text, token_ids)) if each else None
    return encode_in_slices(Tokens(len(token_ids), max_model_len, token_ids, texts))


def _decoded(tokenizer: Tokenizer, token_ids: list[int]) -> bytes:
    return encode_in_slices(Text(tokenizer.decode(token_ids, skip_special_tokens=False)))
