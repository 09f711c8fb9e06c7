"""Python's literals into JSON while they are written, for calls in Python's syntax.

Texts are given out as they come, and numbers and names when they are complete, so a long value costs a little with each
piece of text.
"""

import ast
import json
import re
from collections.abc import Callable
from typing import Any

from router.parsing.python_texts import python_text
from router.parsing.reader import Emit, MalformedError, Reader, Steps

MAX_DEPTH = 64  # of brackets
MAX_SCALAR_CHARS = 512  # of a number or a name
_RUN = re.compile(r"[^'\"(\[{)\]},:]*")  # what changes nothing in a scalar
_PLAIN = re.compile(r"-?(?:0|[1-9][0-9]{0,15})")  # what JSON writes as Python does
_NAMES = {"True": "true", "False": "false", "None": "null"}
_CLOSES = {"[": "]", "(": ")", "{": "}"}


def python_literal(reader: Reader, emit: Emit, depth: int = 0) -> Steps[None]:
    """Gives out one literal as json.dumps writes it; the comma or bracket behind it stays. Raises MalformedError and
    EndedError."""
    yield from reader.spaces()
    sign = yield from reader.peek()
    if sign not in _CLOSES:
        yield from _scalar(reader, emit)
    elif depth == MAX_DEPTH:
        raise MalformedError
    else:
        reader.take(1)
        body = {"[": _list, "(": _tuple, "{": _dict}[sign]
        yield from body(reader, emit, depth + 1)
        reader.take(1)
    yield from reader.spaces()


def _list(reader: Reader, emit: Emit, depth: int) -> Steps[None]:
    emit("[")
    yield from _items(reader, emit, "]", lambda item: python_literal(reader, item, depth))
    emit("]")


def _dict(reader: Reader, emit: Emit, depth: int) -> Steps[None]:
    def item(into: Emit) -> Steps[None]:
        key: list[str] = []
        yield from _scalar(reader, key.append)
        yield from reader.literal(":")
        text = "".join(key)
        into(text if text.startswith('"') else f'"{text}"')
        into(": ")
        yield from python_literal(reader, into, depth)

    emit("{")
    yield from _items(reader, emit, "}", item)
    emit("}")


def _tuple(reader: Reader, emit: Emit, depth: int) -> Steps[None]:
    """Reads a tuple or a value in brackets; which of the two is known after the first item."""
    held: list[str] = []
    yield from reader.spaces()
    if (yield from reader.peek()) != ")":
        yield from python_literal(reader, held.append, depth)
        if (yield from reader.peek()) == ")":
            for piece in held:
                emit(piece)
            return
    emit("[")
    for piece in held:
        emit(piece)
    if held:
        yield from reader.literal(",")
        before = ", "
    else:
        before = ""
    yield from _items(reader, emit, ")", lambda item: python_literal(reader, item, depth), before)
    emit("]")


def _items(
    reader: Reader, emit: Emit, closing: str, item: Callable[[Emit], Steps[None]], before: str = ""
) -> Steps[None]:
    """Reads items up to `closing`, which stays. `before`: what is emitted before the first one."""
    while True:
        yield from reader.spaces()
        if (yield from reader.peek()) == closing:
            return
        if before:
            emit(before)
        yield from item(emit)
        before = ", "
        if (yield from reader.peek()) == closing:
            return
        yield from reader.literal(",")


def _scalar(reader: Reader, emit: Emit) -> Steps[None]:
    """A number, a name or a text, up to the sign behind it."""
    parts: list[str] = []
    num_chars = 0
    while True:
        parts.append(reader.take_run(_RUN))
        num_chars += len(parts[-1])
        if num_chars > MAX_SCALAR_CHARS:
            raise MalformedError
        if (sign := (yield from reader.peek())) in "'\"([{)]},:":
            break
    text = "".join(parts).strip()
    if sign not in "'\"":
        return emit(_json(text))
    if text not in ("", "r", "R", "u", "U"):
        raise MalformedError
    yield from python_text(reader, emit, raw=text in ("r", "R"))


def _json(text: str) -> str:
    """Raises MalformedError."""
    if _PLAIN.fullmatch(text):
        return text if text != "-0" else "0"
    if text in _NAMES:
        return _NAMES[text]
    try:
        value: Any = ast.literal_eval(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise MalformedError from error
