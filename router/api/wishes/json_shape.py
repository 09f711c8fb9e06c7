"""Bounds the number of values in a JSON text, and the depth to which they are nested, before it is decoded.

Decoding lets no other thread run and takes the longer the more values there are; what is nested deeper than the stack
allows ends what walks through it. numpy lets other threads run meanwhile.
"""

import re
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from router.api.wishes.validation import IN_PLACE_BYTES, MAX_VALUES, NAME_COST
from runtime.errors import InvalidRequestError

MAX_DEPTH: Final = 128  # lists and objects in each other; a level of a schema takes two
ESCAPES_PER_VALUE: Final = 8  # escaped characters of texts
SLICE_BYTES: Final = 256 * 1024
NAME_BYTES: Final = 64  # of a field's name, as it is shown
PEELS: Final = 8  # times that the innermost lists and objects are taken away, before all is looked at

_TEXT: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)  # or without an end
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


def check_shape(data: bytes) -> None:
    """Checks a body. Raises InvalidRequestError, naming the field that is nested too deeply."""
    if len(data) > IN_PLACE_BYTES or _may_be_deep(data):
        _check(data, None)


def check_depth(where: str, text: str | bytes) -> None:
    """Checks a JSON text in a field. Raises InvalidRequestError."""
    data = text.encode("utf-8", "replace") if isinstance(text, str) else text
    if _may_be_deep(data):
        _check(data, where)


def _may_be_deep(data: bytes) -> bool:
    """A quick look, which takes a fifth of the time of `_check`. False: it is not."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return False
    brackets = _TEXT.sub(b"", data).translate(None, _NO_BRACKETS)
    for peeled in range(PEELS):
        if len(brackets) + 2 * peeled <= MAX_DEPTH:
            return False
        brackets = brackets.replace(b"{}", b"").replace(b"[]", b"")
    return True


def _check(data: bytes, where: str | None) -> None:
    """`where` None: the values are counted too."""
    values, depth, named_at = 0, 0, 0
    for start, part, outside, escapes in _slices(data):
        bare = np.where(outside, part, np.uint8(0))
        begins, ends = (bare == ord("[")) | (bare == ord("{")), (bare == ord("]")) | (bare == ord("}"))
        depths = depth + np.cumsum(begins.astype(np.int32) - ends)
        depth, names = int(depths[-1]), bare == ord(":")
        deep = np.flatnonzero(depths > MAX_DEPTH)
        told = np.flatnonzero(names[: deep[0] if len(deep) else None] & (depths[: deep[0] if len(deep) else None] == 1))
        named_at = start + int(told[-1]) if len(told) else named_at
        if len(deep):
            problem = f"is nested more than {MAX_DEPTH} levels deep; make it flatter"
            raise InvalidRequestError(where or _name_before(data, named_at), problem)
        values += escapes // ESCAPES_PER_VALUE + NAME_COST * int(np.count_nonzero(names))
        values += int(np.count_nonzero(begins)) + int(np.count_nonzero(bare == ord(",")))
        if values > MAX_VALUES and where is None:
            counted = f"a named one counts {NAME_COST}, {ESCAPES_PER_VALUE} escaped characters one"
            raise InvalidRequestError("body", f"has more than {MAX_VALUES} values ({counted}); send several requests")


def _slices(data: bytes) -> Iterator[tuple[int, NDArray[np.uint8], NDArray[np.bool_], int]]:
    """(where it begins, bytes, which of them are in no text, number of escaped characters) of each slice."""
    in_text, escaped = False, False
    for start in range(0, len(data), SLICE_BYTES):
        part = np.frombuffer(data, np.uint8, min(SLICE_BYTES, len(data) - start), start)
        quotes = part == ord('"')
        at = np.flatnonzero(part == ord("\\"))
        escapes = 0
        if escaped:  # by the last byte of the slice before
            quotes[0] = False
            at = at[at > 0]
        escaped = False
        if len(at):
            begins = np.maximum.accumulate(np.where(np.diff(at, prepend=-2) > 1, at, 0))  # of each run of backslashes
            behind = at[(at - begins) % 2 == 0] + 1
            escaped = bool(behind[-1] == len(part))
            quotes[behind[: len(behind) - escaped]] = False
            escapes = len(behind)
        texts = (np.cumsum(quotes, dtype=np.uint8) + in_text) % 2
        in_text = bool(texts[-1])
        yield start, part, texts == 0, escapes


def _name_before(data: bytes, colon: int) -> str:
    """The field of a body whose colon stands there."""
    end = data.rfind(b'"', 0, colon)
    begin = data.rfind(b'"', max(0, end - NAME_BYTES), max(0, end))
    return data[begin + 1 : end].decode("utf-8", "replace") if 0 <= begin < end else "body"
