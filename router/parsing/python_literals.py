"""Python's literals into JSON while they are written, for calls in Python's syntax.

Of a list or dict every part is given out when it is complete, so a long value costs a little with each piece of text.
"""

import ast
import json
import re
from collections.abc import Callable
from typing import Any

from router.parsing.reader import Emit, MalformedError, Reader, Steps

MAX_DEPTH = 64  # of brackets
_RUN = {  # what changes nothing in a scalar, by the quote that is open
    "": re.compile(r"[^'\"(\[{)\]},:]*"),
    "'": re.compile(r"[^'\\]*"),
    '"': re.compile(r'[^"\\]*'),
}
_PLAIN = re.compile(r"-?(?:0|[1-9][0-9]{0,15})")  # what JSON writes as Python does
_NAMES = {"True": "true", "False": "false", "None": "null"}
_CLOSES = {"[": "]", "(": ")", "{": "}"}


def python_literal(reader: Reader, emit: Emit, depth: int = 0) -> Steps[None]:
    """Gives out one literal as json.dumps writes it; the comma or bracket behind it stays. Raises MalformedError and
    EndedError."""
    yield from reader.spaces()
    sign = yield from reader.peek()
    if sign not in _CLOSES:
        emit(_json((yield from _scalar(reader))))
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
        key = _json((yield from _scalar(reader)))
        into(key if key.startswith('"') else f'"{key}"')
        yield from reader.literal(":")
        into(": ")
        yield from python_literal(reader, into, depth)

    emit("{")
    yield from _items(reader, emit, "}", item)
    emit("}")


def _tuple(reader: Reader, emit: Emit, depth: int) -> Steps[None]:
    """Whether it is one, or a value in brackets, is known after its first item."""
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
    """Up to `closing`, which stays. `before`: what stands before the first one."""
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


def _scalar(reader: Reader) -> Steps[str]:
    """The text of a number, a name or a string, up to the sign behind it."""
    parts: list[str] = []
    quote, escaped = "", False
    while True:
        if not escaped:
            parts.append(reader.take_run(_RUN[quote]))
        sign = yield from reader.peek()
        if not quote and sign in "([{)]},:":
            return "".join(parts).strip()
        parts.append(reader.take(1))
        if quote:
            quote = quote if escaped or sign != quote else ""
            escaped = not escaped and sign == "\\"
        elif sign in "'\"":
            quote = sign


def _json(text: str) -> str:
    """Raises MalformedError."""
    if _PLAIN.fullmatch(text):
        return text if text != "-0" else "0"
    if text in _NAMES:
        return _NAMES[text]
    try:
        value: Any = ast.literal_eval(text)
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise MalformedError from error
