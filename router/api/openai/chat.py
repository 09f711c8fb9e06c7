"""Answers of /v1/chat/completions: one whole object, or chunks. Shapes as OpenAI documents them."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec import UNSET, Struct, UnsetType

from baton_proto.sampling import TokenLogprobs
from router.api.dialects.dialect import Answer
from router.api.openai.answers import CompletionTokensDetails, Heading, RunningUsage, Usage, Wanted, usage_of
from router.api.openai.shown_prompt import Detail, JsonLists
from router.api.openai.token_names import TokenNames, finite
from router.parsing.events import Arguments, CallBegun, CallCut, Event, Reasoning, Text
from router.requests.request import Finished, Piece
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
    """A call of a message, or a piece of one in a delta. The first piece names id, type and function."""

    function: Function
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Message(Struct):
    content: str | None = ""
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same, under the name that newer clients read
    tool_calls: list[Call] | UnsetType = UNSET


class Choice(Struct):
    index: int
    message: Message
    logprobs: ChoiceLogprobs | None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    object: str = "chat.completion"
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: list[Mapping[int, Detail] | None] | UnsetType = UNSET  # vLLM's


class Delta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None  # with include_usage alone: null in all chunks but the last
    object: str = "chat.completion.chunk"
    prompt_token_ids: Sequence[int] | UnsetType = UNSET  # in the first chunk


class ChatAnswer(Answer):
    def __init__(self, heading: Heading, tokenizer: Tokenizer, wanted: Wanted) -> None:
        self._heading = heading
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._usage_so_far = RunningUsage(wanted)
        self._prompt: Sequence[int] | UnsetType = wanted.prompt_of(0) if wanted.prompts else UNSET
        self._choices = [
            Choice(
                index=index,
                message=Message(wanted.told.begun),
                logprobs=ChoiceLogprobs() if wanted.logprobs else None,
                token_ids=[] if wanted.prompts else UNSET,
            )
            for index in range(wanted.num_choices)
        ]
        self._begun: set[int] = set()
        self._reasoning_tokens: int | None = None  # None: nothing was taken apart
        self._names = [TokenNames(tokenizer, wanted.told.as_ids) for _ in range(wanted.num_choices)]
        self._lists = [JsonLists() for _ in range(wanted.num_choices)]  # log-probabilities of each choice
        self._prompt_lists: JsonLists | None = None

    @property
    def of_prompts(self) -> "ChatAnswer | None":
        return self if self._wanted.shown else None

    def prompt_chunks(self, piece: Piece) -> Iterator[Struct]:
        """Always empty: the body refuses prompt_logprobs with a stream."""
        return iter(())

    def add_prompt(self, piece: Piece) -> Iterator[None]:
        """All choices have the same prompt, which comes with the first piece of all."""
        if self._prompt_lists is None:
            self._prompt_lists = JsonLists()
            for part in self._wanted.shown[0].parts(piece.prompt_logprobs):
                self._prompt_lists.add("prompt_logprobs", part.details)
                yield

    def chunks(self, piece: Piece) -> Iterator[Struct]:
        if piece.index not in self._begun:
            first = ChunkChoice(piece.index, Delta(role="assistant", content=""))
            yield self._chunk(first, UNSET if self._begun else self._prompt)
            self._begun.add(piece.index)
            if self._wanted.told.begun:
                yield self._chunk(ChunkChoice(piece.index, Delta(content=self._wanted.told.begun)))
        self._usage_so_far.add(piece)
        self._count(piece)
        logprobs = self._logprobs(piece) if self._wanted.logprobs else None
        token_ids = piece.token_ids if self._wanted.prompts else UNSET
        for delta in filter(None, map(_delta, self._shown(piece))):
            yield self._chunk(ChunkChoice(piece.index, delta, logprobs, token_ids=token_ids))
            logprobs, token_ids = None, UNSET
        if (logprobs and logprobs.content) or token_ids:
            yield self._chunk(ChunkChoice(piece.index, Delta(), logprobs, token_ids=token_ids))
        if piece.finish_reason is not None:
            yield self._chunk(ChunkChoice(piece.index, Delta(), None, piece.finish_reason, piece.stop_reason))

    def ending(self, finished: Finished) -> Iterator[Struct]:
        if self._wanted.usage:
            usage = self._with_reasoning(usage_of(finished))
            yield ChatChunk(self._heading.id, self._heading.created, self._heading.model, [], usage)

    def add(self, piece: Piece) -> None:
        choice = self._choices[piece.index]
        self._count(piece)
        for event in self._shown(piece):
            _add(choice.message, event)
        choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
        if choice.logprobs is not None:
            self._lists[piece.index].add("content", token_logprobs(self._tokenizer, self._names[piece.index], piece))
        if choice.token_ids is not UNSET:
            choice.token_ids += piece.token_ids

    def whole(self, finished: Finished) -> ChatCompletion:
        for choice in self._choices:
            if choice.message.tool_calls:
                choice.message.content = choice.message.content or None
            if choice.logprobs is not None:
                choice.logprobs.content = self._lists[choice.index].whole("content")
        heading, usage, lists = self._heading, self._with_reasoning(usage_of(finished)), self._prompt_lists
        return ChatCompletion(
            id=heading.id,
            created=heading.created,
            model=heading.model,
            choices=self._choices,
            usage=usage,
            prompt_token_ids=self._prompt,
            prompt_logprobs=UNSET if lists is None else lists.whole("prompt_logprobs"),
        )

    def _shown(self, piece: Piece) -> Iterator[Event]:
        return (event for event in piece.events if self._wanted.told.reasoning or not isinstance(event, Reasoning))

    def _count(self, piece: Piece) -> None:
        if piece.parsed is not None:
            self._reasoning_tokens = (self._reasoning_tokens or 0) + piece.reasoning_tokens

    def _with_reasoning(self, usage: Usage) -> Usage:
        if self._reasoning_tokens is None:
            return usage
        details = usage.completion_tokens_details or CompletionTokensDetails()
        details = msgspec.structs.replace(details, reasoning_tokens=self._reasoning_tokens)
        return msgspec.structs.replace(usage, completion_tokens_details=details)

    def _chunk(self, choice: ChunkChoice, prompt: Sequence[int] | UnsetType = UNSET) -> ChatChunk:
        heading = self._heading
        usage = self._usage_so_far.of(choice.index)
        return ChatChunk(heading.id, heading.created, heading.model, [choice], usage, prompt_token_ids=prompt)

    def _logprobs(self, piece: Piece) -> ChoiceLogprobs:
        return ChoiceLogprobs(token_logprobs(self._tokenizer, self._names[piece.index], piece))


def token_logprobs(tokenizer: Tokenizer, names: TokenNames, piece: Piece) -> list[TokenLogprob]:
    """Returns one per token, if the request asks for them. Bytes are each token's own, unless it is told by its id."""

    def spelled(token_id: int, logprob: float) -> TopLogprob:
        name = names.of(token_id)
        told = name.encode() if names.as_ids else tokenizer.token_bytes(token_id)
        return TopLogprob(name, finite(logprob), list(told))

    def one(token_id: int, logprobs: TokenLogprobs) -> TokenLogprob:
        sampled, top = spelled(token_id, logprobs.logprob), [spelled(*other) for other in logprobs.top]
        names.next(token_id)
        return TokenLogprob(sampled.token, sampled.logprob, sampled.bytes, top)

    return list(map(one, piece.token_ids, piece.logprobs))


def _delta(event: Event) -> Delta | None:
    match event:
        case Text(text):
            return Delta(content=text)
        case Reasoning(text):
            return Delta(reasoning_content=text, reasoning=text)
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
            message.reasoning_content = message.reasoning = (message.reasoning_content or "") + text
        case CallBegun(_, call_id, name):
            message.tool_calls = [*(message.tool_calls or ()), Call(Function("", name), UNSET, call_id, "function")]
        case Arguments(_, text):
            assert message.tool_calls
            message.tool_calls[-1].function.arguments += text
        case CallCut():
            assert message.tool_calls
            message.tool_calls = message.tool_calls[:-1] or UNSET
