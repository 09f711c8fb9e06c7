"""How long a text with counted repeats becomes when they are written out: (a{1000}){1000} is a million."""

import re
from typing import Final

MAX_WRITTEN_OUT: Final = 20_000
_PART = re.compile(r"\\.|\(|\)|\{\s*+0*+(\d*+)\s*+(?:,\s*+0*+(\d*+)\s*+)?+\}", re.DOTALL | re.ASCII)
_MOST: Final = 10**9  # all that is larger counts as this


def written_out(text: str) -> int:
    """The largest product of nested repeats, or _MOST. Other text is read as if it were a regular expression, which
    makes it no longer than it is."""
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
