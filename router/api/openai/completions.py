"""Answers of /v1/completions: one whole object, or chunks. Shapes as OpenAI documents them.

A request may have several prompts; choice j of prompt i has the index i * n + j.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec import UNSET, Struct, UnsetType

from router.api.dialects.dialect import Answer
from router.api.openai.answers import Heading, RunningUsage, Usage, Wanted, usage_of
from router.api.openai.shown_prompt import Detail, JsonLists, Logprobs, ShownPrompt
from router.api.openai.token_names import TokenNames, finite
from router.requests.request import Finished, Piece
from router.text.tokenizer import Tokenizer


class Choice(Struct):
    index: int
    text: str = ""
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET  # in the first chunk of a choice
    prompt_logprobs: list[Mapping[int, Detail] | None] | UnsetType = UNSET  # vLLM's


class Completion(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType | None  # in chunks with include_usage alone: null in all but the last
    object: str = "text_completion"


class CompletionAnswer(Answer):
    def __init__(self, heading: Heading, tokenizer: Tokenizer, wanted: Wanted) -> None:
        self._heading = heading
        self._wanted = wanted
        self._usage_so_far = RunningUsage(wanted)
        indices = range(wanted.num_choices)
        self._choices = [
            Choice(
                index,
                logprobs=Logprobs() if wanted.logprobs else None,
                token_ids=[] if wanted.prompts else UNSET,
                prompt_token_ids=wanted.prompt_of(index) if wanted.prompts else UNSET,
            )
            for index in indices
        ]
        self._lists = [JsonLists() for _ in indices]  # log-probabilities of each choice, with its prompt's
        as_ids = wanted.told.as_ids
        self._writers = [_LogprobWriter(TokenNames(tokenizer, as_ids)) if wanted.logprobs else None for _ in indices]
        self._prompts = {index: _Prompt(shown) for index, shown in enumerate(wanted.shown)}  # by choice
        self._begun: set[int] = set()

    @property
    def of_prompts(self) -> "CompletionAnswer | None":
        return self if self._prompts else None

    def prompt_chunks(self, piece: Piece) -> Iterator[Struct]:
        prompt = self._prompts[piece.index]
        if prompt.begin():
            for part in prompt.shown.parts(piece.prompt_logprobs):
                choice = Choice(piece.index, part.text, part.logprobs)
                self._begin(choice)
                yield self._completion([choice], self._usage_so_far.of(piece.index))
            self._end_prompt(piece, prompt)

    def add_prompt(self, piece: Piece) -> Iterator[None]:
        prompt, choice = self._prompts[piece.index], self._choices[piece.index]
        if prompt.begin():
            for part in prompt.shown.parts(piece.prompt_logprobs):
                choice.text += part.text
                self._add_logprobs(piece.index, part.logprobs)
                self._lists[piece.index].add("prompt_logprobs", part.details)
                yield
            self._end_prompt(piece, prompt)

    def _end_prompt(self, piece: Piece, prompt: "_Prompt") -> None:
        if (writer := self._writers[piece.index]) is not None:
            writer.offset = prompt.shown.end

    def chunks(self, piece: Piece) -> Iterator[Struct]:
        choice = self._choice(piece)
        if choice.text or choice.finish_reason is not None or choice.token_ids or _has_tokens(choice.logprobs):
            yield self._completion([choice], self._usage_so_far.of(piece.index))

    def ending(self, finished: Finished) -> Iterator[Struct]:
        if self._wanted.usage:
            yield self._completion([], usage_of(finished))

    def add(self, piece: Piece) -> None:
        choice, more = self._choices[piece.index], self._choice(piece)
        choice.text += more.text
        choice.finish_reason, choice.stop_reason = more.finish_reason, more.stop_reason
        self._add_logprobs(piece.index, more.logprobs)
        if choice.token_ids is not UNSET:
            choice.token_ids += more.token_ids or ()

    def whole(self, finished: Finished) -> Completion:
        for choice, lists in zip(self._choices, self._lists, strict=True):
            if choice.logprobs is not None:
                choice.logprobs = Logprobs(*map(lists.whole, Logprobs.__struct_fields__))
        for index, prompt in self._prompts.items():
            if prompt.shown.wish.details is not None:
                self._choices[index].prompt_logprobs = self._lists[index].whole("prompt_logprobs")
        return self._completion(self._choices, usage_of(finished))

    def _add_logprobs(self, index: int, logprobs: Logprobs | None) -> None:
        if logprobs is not None:
            for name in Logprobs.__struct_fields__:
                self._lists[index].add(name, getattr(logprobs, name))

    def _completion(self, choices: list[Choice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self._heading.id, self._heading.created, self._heading.model, choices, usage)

    def _choice(self, piece: Piece) -> Choice:
        if piece.index in self._prompts and self._prompts[piece.index].shown.wish.no_output:
            choice = Choice(piece.index, finish_reason=piece.finish_reason and "length")
            token_ids: list[int] = []
        else:
            writer = self._writers[piece.index]
            logprobs = None if writer is None else writer.write(piece)
            choice = Choice(piece.index, piece.text, logprobs, piece.finish_reason, piece.stop_reason)
            token_ids = piece.token_ids
            self._usage_so_far.add(piece)
        if self._wanted.prompts:
            choice.token_ids = token_ids
        self._begin(choice)
        return choice

    def _begin(self, choice: Choice) -> None:
        """The first chunk of a choice tells the tokens of its prompt, where they are wanted."""
        if self._wanted.prompts and choice.index not in self._begun:
            self._begun.add(choice.index)
            choice.prompt_token_ids = self._wanted.prompt_of(choice.index)


def _has_tokens(logprobs: Logprobs | None) -> bool:
    return logprobs is not None and bool(logprobs.tokens)


@dataclass(slots=True)
class _Prompt:
    shown: ShownPrompt
    begun: bool = False

    def begin(self) -> bool:
        """Marks the prompt as shown. Returns whether it was not shown before."""
        begun, self.begun = self.begun, True
        return not begun


class _LogprobWriter:
    """Knows where the name of each token of a choice begins."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self.offset = 0

    def write(self, piece: Piece) -> Logprobs:
        written = Logprobs()
        if piece.logprobs:
            for token_id, logprobs in zip(piece.token_ids, piece.logprobs, strict=True):
                written.top_logprobs.append(self._names.top(logprobs.top, token_id, logprobs.logprob))
                written.tokens.append(self._names.next(token_id))
                written.token_logprobs.append(finite(logprobs.logprob))
                written.text_offset.append(self.offset)
                self.offset += len(written.tokens[-1])
        return written
