"""Keeps control tokens that callers spell out, such as `<|im_end|>`, from ending their turn and forging another one.

A tokenizer finds control tokens by their text, whoever wrote it. Therefore each one that stands in a message gets a
separator behind its first character. The prompt's text is cut at the separators and its parts are tokenized one by one,
so the model reads the same characters as ordinary tokens.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers

from router.text.chat_template import Message
from router.text.segment_cache import begins
from runtime.errors import InvalidRequestError

SEPARATORS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # Unicode's noncharacters: programs may use them, texts have none
_TRUSTED_ROLES = ("assistant", "system", "developer")


class Plain(NamedTuple):
    messages: Sequence[Message]
    variables: Mapping[str, Any]
    separator: str | None  # where a control token was cut; None: there was none


class ControlTokens:
    def __init__(self, added: Iterable[tokenizers.AddedToken], template: str, marks: Collection[str]) -> None:
        """Control tokens are all special ones and those of which `template` makes its turns. `marks`: of reasoning and
        calls, which assistants' messages repeat and system prompts explain; there they stay, unless they are special.
        """
        control = [token for token in added if len(token.content) > 1 and not token.content.isspace()]
        control = [token for token in control if token.special or token.content in template]
        turns = (token.content for token in control if token.special or token.content not in marks)
        self._all = _cuts([token.content for token in control])
        self._turns = _cuts(list(turns))

    def plain(self, messages: Sequence[Message], variables: Mapping[str, Any] | None) -> Plain:
        """Cuts callers' control tokens, so that a template can join the parts without making one. Raises
        InvalidRequestError."""
        for separator in SEPARATORS:
            cutting = _Cutting(separator)
            cut = [cutting.value(each, self._pattern_of(each)) for each in messages]
            others = cutting.value(variables or {}, self._all)
            if not cutting.found_separator:
                return Plain(cut, others, separator if cutting.has_cut else None)
        problem = "have control tokens of the model and all noncharacters from U+FDD0 to U+FDEF: leave one of these out"
        raise InvalidRequestError("messages", problem)

    def _pattern_of(self, message: Message) -> "re.Pattern[str] | None":
        return self._turns if message.get("role") in _TRUSTED_ROLES else self._all


class _Cutting:
    def __init__(self, separator: str) -> None:
        self._separator = separator
        self.has_cut = False
        self._saw_separator = False

    @property
    def found_separator(self) -> bool:
        """The separator stands in a text already, so it cannot tell where tokens were cut."""
        return self.has_cut and self._saw_separator

    def value(self, value: Any, pattern: "re.Pattern[str] | None") -> Any:
        """Raises RecursionError for what is nested too deep."""
        if isinstance(value, str):
            return self._text(value, pattern)
        if isinstance(value, Mapping):
            return {self.value(name, pattern): self.value(each, pattern) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(each, pattern) for each in value]
        return value

    def _text(self, text: str, pattern: "re.Pattern[str] | None") -> str:
        self._saw_separator = self._saw_separator or self._separator in text
        at = [start + 1 for start in begins(pattern, text)] if pattern is not None else []
        if not at:
            return text
        self.has_cut = True
        return self._separator.join(text[start:end] for start, end in zip([0, *at], [*at, len(text)], strict=True))


def _cuts(texts: Collection[str]) -> "re.Pattern[str] | None":
    """Matches the first character of each of `texts`, also where they overlap."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[0], []).append(re.escape(text[1:]))
    patterns = (f"{re.escape(first)}(?={'|'.join(those)})" for first, those in rests.items())
    return re.compile("|".join(patterns)) if rests else None
