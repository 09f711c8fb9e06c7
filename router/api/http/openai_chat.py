"""Answers of /v1/chat/completions: one whole object, or chunks. Shapes as OpenAI documents them."""

from collections.abc import Iterator

from msgspec import UNSET, Struct, UnsetType

from baton_proto.sampling import TokenLogprobs
from router.api.http.openai_answer import Heading, Usage, finite
from router.requests.request import Piece
from router.text.tokenizer import Tokenizer


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(Struct):
    content: list[TokenLogprob] = []
    refusal: None = None


class Message(Struct):
    content: str = ""
    role: str = "assistant"
    refusal: None = None


class Choice(Struct):
    index: int
    message: Message
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None = None


class ChatCompletion(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    object: str = "chat.completion"


class Delta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None  # with include_usage: null in all chunks but the last
    object: str = "chat.completion.chunk"


class ChatAnswer:
    def __init__(
        self, heading: Heading, tokenizer: Tokenizer, num_choices: int, with_logprobs: bool, include_usage: bool
    ) -> None:
        self._heading = heading
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._no_usage: UnsetType | None = None if include_usage else UNSET
        self._choices = [
            Choice(index, Message(), ChoiceLogprobs() if with_logprobs else None) for index in range(num_choices)
        ]
        self._begun: set[int] = set()

    def chunks(self, piece: Piece) -> Iterator[Struct]:
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            yield self._chunk(ChunkChoice(piece.index, Delta(role="assistant", content="")))
        logprobs = self._logprobs(piece) if self._with_logprobs else None
        if piece.text or (logprobs and logprobs.content):
            yield self._chunk(ChunkChoice(piece.index, Delta(content=piece.text), logprobs))
        if piece.finish_reason is not None:
            yield self._chunk(ChunkChoice(piece.index, Delta(), finish_reason=piece.finish_reason))

    def usage_chunk(self, usage: Usage) -> Struct:
        return ChatChunk(self._heading.id, self._heading.created, self._heading.model, [], usage)

    def add(self, piece: Piece) -> None:
        choice = self._choices[piece.index]
        choice.message.content += piece.text
        choice.finish_reason = piece.finish_reason
        if choice.logprobs is not None:
            choice.logprobs.content += self._logprobs(piece).content

    def whole(self, usage: Usage) -> ChatCompletion:
        return ChatCompletion(self._heading.id, self._heading.created, self._heading.model, self._choices, usage)

    def _chunk(self, choice: ChunkChoice) -> ChatChunk:
        return ChatChunk(self._heading.id, self._heading.created, self._heading.model, [choice], self._no_usage)

    def _logprobs(self, piece: Piece) -> ChoiceLogprobs:
        return ChoiceLogprobs(list(map(self._token_logprob, piece.token_ids, piece.logprobs)))

    def _token_logprob(self, token_id: int, logprobs: TokenLogprobs) -> TokenLogprob:
        top = [self._top_logprob(other_id, logprob) for other_id, logprob in logprobs.top]
        sampled = self._top_logprob(token_id, logprobs.logprob)
        return TokenLogprob(sampled.token, sampled.logprob, sampled.bytes, top)

    def _top_logprob(self, token_id: int, logprob: float) -> TopLogprob:
        spelled = self._tokenizer.token_bytes(token_id)
        return TopLogprob(spelled.decode("utf-8", "replace"), finite(logprob), list(spelled))
