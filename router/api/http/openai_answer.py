"""What the answers of both OpenAI endpoints have in common."""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from msgspec import UNSET, Struct, UnsetType

from router.api.prompts.shown import ShownPrompt
from router.requests.request import Finished, Piece
from router.text.tokenizer import Tokenizer


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class Heading(Struct, frozen=True):
    """First fields of every answer and chunk."""

    id: str
    model: str
    created: int

    @classmethod
    def new(cls, prefix: str, request_id: str, model: str) -> "Heading":
        return cls(f"{prefix}-{request_id}", model, int(time.time()))


class Answer(Protocol):
    """An endpoint's form of the output, one object per HTTP request. A streamed answer is made of `chunks` and
    `usage_chunk`, a whole one of `add` and `whole`.

    Where the request wants its prompts shown, `prompt_chunks` or `add_prompt` goes before each piece; others may run
    between their results.
    """

    def __init__(
        self, heading: Heading, tokenizer: Tokenizer, num_choices: int, with_logprobs: bool, include_usage: bool
    ) -> None: ...

    def show_prompts(self, prompts: Sequence[ShownPrompt]) -> None:
        """`prompts`: one per choice."""
        ...

    def prompt_chunks(self, piece: Piece) -> Iterable[Struct]: ...

    def add_prompt(self, piece: Piece) -> Iterable[None]: ...

    def chunks(self, piece: Piece) -> Iterable[Struct]:
        """The events of a piece."""
        ...

    def usage_chunk(self, usage: Usage) -> Struct: ...

    def add(self, piece: Piece) -> None:
        """Collects a piece for the whole answer."""
        ...

    def whole(self, usage: Usage) -> Any: ...


def usage_of(finished: Finished) -> Usage:
    return Usage(
        finished.prompt_tokens,
        finished.completion_tokens,
        finished.prompt_tokens + finished.completion_tokens,
        PromptTokensDetails(finished.cached_tokens),
    )
