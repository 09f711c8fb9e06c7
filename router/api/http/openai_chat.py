"""Answers of /v1/chat/completions: one whole object, or chunks. Shapes as OpenAI documents them."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec import UNSET, Struct, UnsetType

from baton_proto.sampling import TokenLogprobs
from router.api.http.openai_answer import CompletionTokensDetails, Heading, Usage
from router.api.prompts.shown import Detail, JsonLists, ShownPrompt, finite
from router.parsing.events import Arguments, CallBegun, CallCut, Event, Reasoning, Text
from router.requests.request import Parsed, Piece
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


class Function(Struct):
    arguments: str = ""
    name: str | UnsetType = UNSET


class Call(Struct):
    """Of a message; of a delta, a piece of one, whose first names id, type and function."""

    function: Function
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Message(Struct):
    content: str | None = ""
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


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
    prompt_logprobs: list[Mapping[int, Detail] | None] | UnsetType = UNSET  # vLLM's


class Delta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


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
        self._reasoning_tokens: int | None = None  # None: nothing was taken apart
        self._prompt: ShownPrompt | None = None
        self._prompt_lists: JsonLists | None = None

    def show_prompts(self, prompts: Sequence[ShownPrompt]) -> None:
        """All choices have the same."""
        self._prompt = prompts[0]

    def prompt_chunks(self, piece: Piece) -> Iterator[Struct]:
        """None: the body refuses what would be shown."""
        return iter(())

    def add_prompt(self, piece: Piece) -> Iterator[None]:
        prompt, self._prompt = self._prompt, None
        if prompt is not None:
            self._prompt_lists = JsonLists()
            for part in prompt.parts(piece.prompt_logprobs):
                self._prompt_lists.add("prompt_logprobs", part.details)
                yield

    def chunks(self, piece: Piece) -> Iterator[Struct]:
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            yield self._chunk(ChunkChoice(piece.index, Delta(role="assistant", content="")))
        logprobs = self._logprobs(piece) if self._with_logprobs else None
        if piece.parsed is not None:
            self._count(piece.parsed)
            for event in piece.parsed.events:
                if (delta := _delta(event)) is not None:
                    yield self._chunk(ChunkChoice(piece.index, delta, logprobs))
                    logprobs = None
            if logprobs and logprobs.content:
                yield self._chunk(ChunkChoice(piece.index, Delta(), logprobs))
        elif piece.text or (logprobs and logprobs.content):
            yield self._chunk(ChunkChoice(piece.index, Delta(content=piece.text), logprobs))
        if piece.finish_reason is not None:
            yield self._chunk(ChunkChoice(piece.index, Delta(), finish_reason=piece.finish_reason))

    def usage_chunk(self, usage: Usage) -> Struct:
        return ChatChunk(self._heading.id, self._heading.created, self._heading.model, [], self._with_reasoning(usage))

    def add(self, piece: Piece) -> None:
        choice = self._choices[piece.index]
        if piece.parsed is None:
            choice.message.content = (choice.message.content or "") + piece.text
        else:
            self._count(piece.parsed)
            for event in piece.parsed.events:
                _add(choice.message, event)
        choice.finish_reason = piece.finish_reason
        if choice.logprobs is not None:
            choice.logprobs.content += self._logprobs(piece).content

    def whole(self, usage: Usage) -> ChatCompletion:
        for choice in self._choices:
            if choice.message.tool_calls:
                choice.message.content = choice.message.content or None
        heading = self._heading
        whole = ChatCompletion(heading.id, heading.created, heading.model, self._choices, self._with_reasoning(usage))
        if self._prompt_lists is None:
            return whole
        return msgspec.structs.replace(whole, prompt_logprobs=self._prompt_lists.whole("prompt_logprobs"))

    def _count(self, parsed: Parsed) -> None:
        self._reasoning_tokens = (self._reasoning_tokens or 0) + parsed.reasoning_tokens

    def _with_reasoning(self, usage: Usage) -> Usage:
        if self._reasoning_tokens is None:
            return usage
        details = CompletionTokensDetails(self._reasoning_tokens)
        return msgspec.structs.replace(usage, completion_tokens_details=details)

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


def _delta(event: Event) -> Delta | None:
    match event:
        case Text(text):
            return Delta(content=text)
        case Reasoning(text):
            return Delta(reasoning_content=text)
        case CallBegun(index, call_id, name):
            return Delta(tool_calls=[Call(Function("", name), index, call_id, "function")])
        case Arguments(index, text):
            return Delta(tool_calls=[Call(Function(text), index)])
        case CallCut():
            return None


def _add(message: Message, event: Event) -> None:
    match event:
        case Text(text):
            message.content = (message.content or "") + text
        case Reasoning(text):
            message.reasoning_content = (message.reasoning_content or "") + text
        case CallBegun(_, call_id, name):
            message.tool_calls = [*(message.tool_calls or ()), Call(Function("", name), UNSET, call_id, "function")]
        case Arguments(_, text):
            assert message.tool_calls
            message.tool_calls[-1].function.arguments += text
        case CallCut():
            assert message.tool_calls
            message.tool_calls = message.tool_calls[:-1] or UNSET
