"""How large a grammar may be, before any native code reads it."""

import re
from typing import Final

from baton_proto.grammar import MAX_ALTERNATIVES, MAX_GRAMMAR_CHARS, Grammar

MAX_WRITTEN_OUT: Final = 20_000
_PART = re.compile(r"\\.|\(|\)|\{\s*+0*+(\d*+)\s*+(?:,\s*+0*+(\d*+)\s*+)?+\}", re.DOTALL | re.ASCII)
_MOST: Final = 10**9  # all that is larger counts as this


def check_size(grammar: Grammar) -> None:
    """Raises ValueError. Invariant: what passes can be sent, because the next process decodes no more."""
    if grammar.num_chars > MAX_GRAMMAR_CHARS:
        raise ValueError(f"has {grammar.num_chars} characters; at most {MAX_GRAMMAR_CHARS} are allowed")
    if len(grammar.choices) > MAX_ALTERNATIVES:
        raise ValueError(f"has {len(grammar.choices)} texts; at most {MAX_ALTERNATIVES} are allowed")
    if not all(_is_whole(text) for text in (grammar.text, *grammar.choices)):
        raise ValueError("has half of a character (a lone surrogate); write the whole one")


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def written_out(text: str) -> int:
    """How long a text becomes when its counted repeats are written out, or _MOST: (a{1000}){1000} is a million. Other
    text is read as if it were a regular expression, which makes it no longer than it is."""
    largest, open_groups, last = 1, [1], 1  # a group's worth; that of what was closed last
    end = 0
    for part in _PART.finditer(text):
        if part.start() > end:
            last = 1
        end = part.end()
        if part[0] == "(":
            open_groups.append(1)
        elif part[0] == ")":
            last = open_groups.pop() if len(open_groups) > 1 else 1
        elif part[0].startswith("{"):
            last = min(last * max(map(_number, part.groups(""))), _MOST)
        else:
            last = 1
        if part[0] != "(":
            open_groups[-1] = max(open_groups[-1], last)
        largest = max(largest, last)
    return largest


def _number(digits: str) -> int:
    return int(digits or 1) if len(digits) < 10 else _MOST
