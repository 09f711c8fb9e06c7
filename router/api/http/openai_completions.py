"""Answers of /v1/completions: one whole object, or chunks. Shapes as OpenAI documents them.

A request may have several prompts; choice j of prompt i has the index i * n + j.
"""

from collections.abc import Iterator

from msgspec import UNSET, Struct, UnsetType

from baton_proto.sampling import TokenLogprobs
from router.api.http.errors import ErrorAnswer, ErrorBody
from router.api.http.openai_answer import Heading, Usage, finite, usage_of
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


class Completion(Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType | None  # in chunks with include_usage: null in all but the last
    object: str = "text_completion"


class CompletionAnswer:
    def __init__(
        self, heading: Heading, tokenizer: Tokenizer, num_choices: int, with_logprobs: bool, include_usage: bool
    ) -> None:
        self._heading = heading
        self._include_usage = include_usage
        self._no_usage: UnsetType | None = None if include_usage else UNSET
        self._choices = [Choice(index, logprobs=Logprobs() if with_logprobs else None) for index in range(num_choices)]
        self._writers = [_LogprobWriter(tokenizer) if with_logprobs else None for _ in range(num_choices)]

    def chunks(self, piece: Piece) -> Iterator[Struct]:
        choice = self._choice(piece)
        if choice.text or choice.finish_reason is not None or (choice.logprobs and choice.logprobs.tokens):
            yield self._completion([choice], self._no_usage)

    def ending(self, finished: Finished) -> Iterator[Struct]:
        if self._include_usage:
            yield self._completion([], usage_of(finished))

    def failure(self, status: int, error: ErrorBody) -> Struct:
        return ErrorAnswer(error)

    def add(self, piece: Piece) -> None:
        choice, more = self._choices[piece.index], self._choice(piece)
        choice.text += more.text
        choice.finish_reason = more.finish_reason
        if choice.logprobs is not None and more.logprobs is not None:
            choice.logprobs.extend(more.logprobs)

    def whole(self, finished: Finished) -> Completion:
        return self._completion(self._choices, usage_of(finished))

    def _completion(self, choices: list[Choice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self._heading.id, self._heading.created, self._heading.model, choices, usage)

    def _choice(self, piece: Piece) -> Choice:
        writer = self._writers[piece.index]
        logprobs = None if writer is None else writer.write(piece)
        return Choice(piece.index, piece.text, logprobs, piece.finish_reason)


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
