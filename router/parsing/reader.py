"""Reads a text that arrives in pieces. Its methods are generators that yield while they wait for more text.

Invariant: what is given out does not depend on where the pieces are cut, except for the cuts between emitted pieces.
Invariant: a character is looked at and copied a bounded number of times, so a text costs no more than its length.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Emit = Callable[[str], None]

MAX_NAME_CHARS = 256
MIN_HALF_MARK = 3  # characters of a mark by which it is told from a text that happens to end with them
_SPACES = re.compile(r"[ \t\r\n]*")
_PLAIN_STRING = re.compile(r'"([^"\\\x00-\x1f]*)"')  # of JSON, without escapes
_QUOTED = re.compile(r'[^"\\]*')  # what changes nothing within a text of JSON,
_BETWEEN = re.compile(r'[^"{}\[\]]*')  # and what changes nothing outside
_SCALAR = re.compile(r"[^,}\] \t\r\n<]*")
_CLOSES = {"{": "}", "[": "]"}


class MalformedError(Exception):
    """The text is not what the format says."""


class EndedError(Exception):
    """The text has ended too early."""


class Reader:
    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # what stands before is read
        self._ended = self._cut = False
        self.raw: list[str] | None = None  # while it is a list: all that is read

    def push(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self, cut: bool = False) -> None:
        """No text follows. `cut`: the answer was stopped at its limit of tokens, perhaps in the middle of a mark."""
        self._ended, self._cut = True, cut

    def until(self, marks: Sequence[str], emit: Emit) -> Steps[str | None]:
        """Gives out the text up to the first of `marks`, which is taken and returned; None: the text has ended."""
        pattern = _any_of(tuple(marks))
        while True:
            if marks and (found := pattern.search(self._text, self._at)):
                self._give(found.start() - self._at, emit)
                self.take(len(found[0]))
                return found[0]
            held = _possible_start(self._text, self._at, marks)
            if self._ended and not (self._cut and held >= MIN_HALF_MARK):
                held = 0
            self._give(len(self._text) - self._at - held, emit)
            if self._ended:
                self.take(held)
                return None
            yield

    def starts_with(self, beginnings: Sequence[str]) -> Steps[str]:
        """Which of `beginnings` the text goes on with; empty: none. Takes nothing."""
        longest = max(map(len, beginnings))
        while True:
            for one in beginnings:
                if self._text.startswith(one, self._at):
                    return one
            rest = self._text[self._at : self._at + longest]
            if self._ended or not any(one.startswith(rest) for one in beginnings):
                return ""
            yield

    def peek(self) -> Steps[str]:
        """The next character. Raises EndedError."""
        while self._at == len(self._text):
            if self._ended:
                raise EndedError
            yield
        return self._text[self._at]

    def take(self, num_chars: int) -> str:
        taken = self._text[self._at : self._at + num_chars]
        self._at += len(taken)
        if self.raw is not None:
            self.raw.append(taken)
        return taken

    def take_run(self, pattern: "re.Pattern[str]") -> str:
        """Takes what matches of the text that is here."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found else ""

    def literal(self, text: str) -> Steps[None]:
        if self._text.startswith(text, self._at):
            self.take(len(text))
            return
        for wanted in text:
            if (yield from self.peek()) != wanted:
                raise MalformedError
            self.take(1)

    def until_sign(self, signs: str) -> Steps[str]:
        """A name, up to one of `signs`, which stays. Raises MalformedError when it is too long for one."""
        name: list[str] = []
        while (sign := (yield from self.peek())) not in signs:
            if len(name) >= MAX_NAME_CHARS:
                raise MalformedError
            name.append(self.take(len(sign)))
        return "".join(name)

    def closing(self, mark: str) -> Steps[None]:
        """Takes the mark that closes a call, or what there is of it. The call is complete without it."""
        yield from self.spaces()
        whole = yield from self.starts_with((mark,))
        if whole or (self._ended and mark.startswith(self._text[self._at :])):
            self.take(len(mark))

    def spaces(self) -> Steps[None]:
        """Skips them; the end of the text is as good."""
        while True:
            self.take_run(_SPACES)
            if self._ended or self._at < len(self._text):
                return
            yield

    def string(self) -> Steps[str]:
        if plain := _PLAIN_STRING.match(self._text, self._at):
            self.take(len(plain[0]))
            return plain[1]
        parts: list[str] = []
        if (yield from self.peek()) != '"':
            raise MalformedError
        yield from self.value(parts.append)
        try:
            value: str = json.loads("".join(parts))
        except ValueError as error:
            raise MalformedError from error
        return value

    def value(self, emit: Emit) -> Steps[None]:
        """Gives out one JSON value as it is written, by its brackets and quotes."""
        first = yield from self.peek()
        if first not in '{["':
            if first not in "-0123456789tfn":
                raise MalformedError
            return (yield from self._scalar(emit))
        expected: list[str] = []  # the brackets that have to close, the innermost last
        in_text = escaped = False
        while True:
            yield from self.peek()
            text, begin = self._text, self._at
            at = begin
            while at < len(text):
                if not escaped and (run := (_QUOTED if in_text else _BETWEEN).match(text, at)):
                    at = run.end()
                    if at == len(text):
                        break
                sign = text[at]
                if escaped:
                    escaped = False
                elif sign == "\\":
                    escaped = True
                elif sign == '"':
                    in_text = not in_text
                elif sign in _CLOSES:
                    expected.append(_CLOSES[sign])
                elif not expected or expected.pop() != sign:
                    self._give(at - begin, emit)
                    raise MalformedError
                at += 1
                if not expected and not in_text:
                    return self._give(at - begin, emit)
            self._give(len(text) - begin, emit)

    def _scalar(self, emit: Emit) -> Steps[None]:
        while True:
            found = self.take_run(_SCALAR)
            if found:
                emit(found)
            if self._ended or self._at < len(self._text):
                return
            yield

    def _give(self, num_chars: int, emit: Emit) -> None:
        if num_chars:
            emit(self.take(num_chars))


@lru_cache(maxsize=256)
def _any_of(marks: tuple[str, ...]) -> "re.Pattern[str]":
    """A pattern of the marks. If several begin at the same character, it finds the longest."""
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))


def _possible_start(text: str, begin: int, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` from `begin` on that is the beginning of a mark."""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text) - begin), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return longest
