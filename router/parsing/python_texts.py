"""Python's string literals into JSON, piece by piece."""

import json
import re
import unicodedata

from router.parsing.reader import Emit, MalformedError, Reader, Steps

_RUN = {  # what changes nothing in a text, by its quote
    "'": re.compile(r"[^'\\]*"),
    '"': re.compile(r'[^"\\]*'),
}
_ONE_SIGN = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_MAX_NAME_CHARS = 128  # of a character, as in \N{DIGIT ONE}


def python_text(reader: Reader, emit: Emit, raw: bool) -> Steps[None]:
    """One or several literals, which Python reads as one text, up to the sign behind them."""
    emit('"')
    while True:
        yield from _literal(reader, emit, raw)
        yield from reader.spaces()
        if (yield from reader.peek()) not in "'\"":
            return emit('"')


def _literal(reader: Reader, emit: Emit, raw: bool) -> Steps[None]:
    quote = yield from reader.peek()
    quotes = quote
    if (yield from reader.starts_with((quote * 3,))):
        quotes = quote * 3
    reader.take(len(quotes))
    while True:
        if run := reader.take_run(_RUN[quote]):
            emit(_escaped(run))
        if (yield from reader.peek()) == "\\":
            reader.take(1)
            emit(_escaped((yield from _raw_escape(reader)) if raw else (yield from _escape(reader))))
        elif (yield from reader.starts_with((quotes,))):
            reader.take(len(quotes))
            return
        else:  # one of a text between three
            emit(_escaped(reader.take(1)))


def _raw_escape(reader: Reader) -> Steps[str]:
    yield from reader.peek()
    return "\\" + reader.take(1)


def _escape(reader: Reader) -> Steps[str]:
    """Reads what stands behind a backslash. Raises MalformedError."""
    sign = yield from reader.peek()
    if sign in "01234567":
        digits = ""
        while len(digits) < 3 and (yield from reader.peek()) in "01234567":
            digits += reader.take(1)
        return chr(int(digits, 8))
    reader.take(1)
    if sign in _NUM_DIGITS:
        digits = ""
        while len(digits) < _NUM_DIGITS[sign]:
            yield from reader.peek()
            digits += reader.take(1)
        try:
            return chr(int(digits, 16))
        except (ValueError, OverflowError) as error:
            raise MalformedError from error
    if sign == "N":
        return (yield from _named(reader))
    return _ONE_SIGN.get(sign, sign if sign in "'\"\\" else f"\\{sign}")


def _named(reader: Reader) -> Steps[str]:
    yield from reader.literal("{")
    name = ""
    while (yield from reader.peek()) != "}":
        name += reader.take(1)
        if len(name) > _MAX_NAME_CHARS:
            raise MalformedError
    reader.take(1)
    try:
        return unicodedata.lookup(name)
    except KeyError as error:
        raise MalformedError from error


def _escaped(text: str) -> str:
    """A half of a surrogate pair can stand in JSON as an escape alone."""
    return json.dumps(text, ensure_ascii=bool(_HALF_PAIR.search(text)))[1:-1]
