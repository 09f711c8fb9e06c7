"""Answers of /v1/completions: one whole object, or chunks. Shapes as OpenAI documents them.

A request may have several prompts; choice j of prompt i has the index i * n + j.
"""

from collections.abc import Iterator, Sequence

from msgspec import UNSET, Struct, UnsetType

from baton_proto.sampling import TokenLogprobs
from router.api.http.errors import ErrorAnswer, ErrorBody
from router.api.http.openai_answer import Heading, Usage, Wanted, finite, usage_of
from router.requests.request import Finished, Piece
from router.text.detokenizer import Detokenizer, make_detokenizer
from router.text.tokenizer import Tokenizer


class Logprobs(Struct):
    """Parallel lists, one entry per token. (msgspec copies mutable defaults.)"""

    tokens: list[str] = []
    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float]] = []
    text_offset: list[int] = []

    def extend(self, more: "Logprobs") -> None:
        self.tokens += more.tokens
        self.token_logprobs += more.token_logprobs
        self.top_logprobs += more.top_logprobs
        self.text_offset += more.text_offset


class Choice(Struct):
    index: int
    text: str = ""
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET  # in the first chunk of a choice


class Completion(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType | None  # in chunks with include_usage: null in all but the last
    object: str = "text_completion"


class CompletionAnswer:
    def __init__(self, heading: Heading, tokenizer: Tokenizer, wanted: Wanted) -> None:
        self._heading = heading
        self._wanted = wanted
        self._no_usage: UnsetType | None = None if wanted.usage else UNSET
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
        self._writers = [_LogprobWriter(tokenizer) if wanted.logprobs else None for _ in indices]
        self._begun: set[int] = set()

    def chunks(self, piece: Piece) -> Iterator[Struct]:
        choice = self._choice(piece)
        if choice.text or choice.finish_reason is not None or choice.token_ids or _has_tokens(choice.logprobs):
            yield self._completion([choice], self._no_usage)

    def ending(self, finished: Finished) -> Iterator[Struct]:
        if self._wanted.usage:
            yield self._completion([], usage_of(finished))

    def failure(self, status: int, error: ErrorBody) -> Struct:
        return ErrorAnswer(error)

    def add(self, piece: Piece) -> None:
        choice, more = self._choices[piece.index], self._choice(piece)
        choice.text += more.text
        choice.finish_reason = more.finish_reason
        if choice.logprobs is not None and more.logprobs is not None:
            choice.logprobs.extend(more.logprobs)
        if choice.token_ids is not UNSET:
            choice.token_ids += piece.token_ids

    def whole(self, finished: Finished) -> Completion:
        return self._completion(self._choices, usage_of(finished))

    def _completion(self, choices: list[Choice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self._heading.id, self._heading.created, self._heading.model, choices, usage)

    def _choice(self, piece: Piece) -> Choice:
        writer = self._writers[piece.index]
        logprobs = None if writer is None else writer.write(piece)
        choice = Choice(piece.index, piece.text, logprobs, piece.finish_reason)
        if self._wanted.prompts:
            choice.token_ids = piece.token_ids
            if piece.index not in self._begun:
                self._begun.add(piece.index)
                choice.prompt_token_ids = self._wanted.prompt_of(piece.index)
        return choice


def _has_tokens(logprobs: Logprobs | None) -> bool:
    return logprobs is not None and bool(logprobs.tokens)


class _LogprobWriter:
    """Knows where in the text of a choice each token begins; tokens of one split character begin at the same place."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer = make_detokenizer(tokenizer)
        self._offset = 0

    def write(self, piece: Piece) -> Logprobs:
        written = Logprobs()
        if piece.logprobs:
            for token_id, logprobs in zip(piece.token_ids, piece.logprobs, strict=True):
                written.tokens.append(self._tokenizer.token_text(token_id))
                written.token_logprobs.append(finite(logprobs.logprob))
                written.top_logprobs.append(self._top(token_id, logprobs))
                written.text_offset.append(self._offset)
                self._offset += len(self._detokenizer.push((token_id,)))
        return written

    def _top(self, sampled_id: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """By text, as the API has it; the sampled token is always among them."""
        top: dict[str, float] = {}
        for token_id, logprob in (*logprobs.top, (sampled_id, logprobs.logprob)):
            top.setdefault(self._tokenizer.token_text(token_id), finite(logprob))
        return top
