"""A prompt as its answer shows it: its text (`echo`), and what the model thought of its tokens.

The parts are small, and making one takes a few ms at most: a prompt may have a hundred thousand tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Raw, Struct
from numpy.typing import NDArray

from baton_proto.sampling import PromptLogprobs
from router.api.openai.token_names import TokenNames, finite
from router.api.wishes.prompt_logprobs import Row, rows_in_parts
from router.text.detokenizer import make_detokenizer
from router.text.tokenizer import Tokenizer

encode_json = msgspec.json.Encoder().encode


class PromptWish(Struct, frozen=True):
    """What a body wants its answer to show of the prompts."""

    echo: bool = False  # the text of the prompt comes before that of the answer
    logprobs: int | None = None  # alternatives per token of an echo
    details: int | None = None  # alternatives per token, as vLLM's prompt_logprobs
    no_output: bool = False  # the prompt is all that is wanted


NO_WISH: Final = PromptWish()


class Logprobs(Struct):
    """Parallel lists, one entry per token; the first token of a prompt has no log-probabilities. (msgspec copies
    mutable defaults.)"""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class Detail(Struct, frozen=True):
    """One alternative in vLLM's prompt_logprobs."""

    logprob: float
    rank: int
    decoded_token: str


class Part(Struct):
    """Some tokens of a prompt, in order."""

    text: str = ""
    logprobs: Logprobs | None = None
    details: list[Mapping[int, Detail] | None] = []


class ShownPrompt:
    def __init__(
        self,
        tokenizer: Tokenizer,
        tokens: NDArray[np.uint32],
        text: str | None,
        wish: PromptWish,
        as_ids: bool = False,
    ) -> None:
        """`text`: the caller's own; None: the tokens are all that the caller gave. `as_ids`: see TokenNames."""
        self.wish = wish
        self.end = 0  # of what was shown, as `text_offset` counts
        self._tokenizer = tokenizer
        self._names, self._texts = TokenNames(tokenizer, as_ids), TokenNames(tokenizer)
        self._tokens = tokens
        self._text = text if wish.echo else None

    def parts(self, found: PromptLogprobs | None) -> Iterator[Part]:
        """`found`: where log-probabilities were asked for."""
        is_spelled = self.wish.echo and self._text is None
        detokenizer = make_detokenizer(self._tokenizer, self._tokenizer.hidden_token_ids)
        for number, rows in enumerate(rows_in_parts(self._tokens, found)):
            part = Part(logprobs=None if self.wish.logprobs is None else Logprobs())
            for row in rows:
                if is_spelled:
                    part.text += detokenizer.push((row.token_id,))
                self._add(part, row)
            if self._text is not None and number == 0:
                part.text = self._text
            yield part
        if rest := detokenizer.flush():
            yield Part(rest)

    def _add(self, part: Part, row: Row) -> None:
        if (told := part.logprobs) is not None:
            logprob = row.logprob
            told.top_logprobs.append(
                None if logprob is None else self._names.top(row.top[: self.wish.logprobs], row.token_id, logprob)
            )
            told.tokens.append(self._names.next(row.token_id))
            told.token_logprobs.append(None if logprob is None else finite(logprob))
            told.text_offset.append(self.end)
            self.end += len(told.tokens[-1])
        if self.wish.details is not None:
            part.details.append(self._detail(row, row.logprob, self.wish.details))

    def _detail(self, row: Row, logprob: float | None, count: int) -> dict[int, Detail] | None:
        if logprob is None:
            return None
        ranked = [(token_id, value, rank) for rank, (token_id, value) in enumerate(row.top[:count], 1)]
        told: dict[int, Detail] = {}
        for token_id, value, rank in ((row.token_id, logprob, row.rank), *ranked):
            told.setdefault(token_id, Detail(finite(value), rank, self._texts.of(token_id)))
        self._texts.next(row.token_id)
        return told


class JsonLists:
    """Lists that grow part by part, as JSON. Because encoding lets nobody else run, each part is encoded when it
    comes."""

    def __init__(self) -> None:
        self._parts: dict[str, list[bytes]] = {}

    def add(self, name: str, values: Sequence[Any]) -> None:
        parts = self._parts.setdefault(name, [])
        if values:
            parts.append(encode_json(values)[1:-1])

    def whole(self, name: str) -> Any:
        """The whole list, to be put into an answer."""
        return Raw(b"[%b]" % b",".join(self._parts.get(name, ())))
