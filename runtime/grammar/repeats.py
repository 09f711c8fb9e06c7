"""How long a text with counted repeats becomes when they are written out: (a{1000}){1000} is a million."""

import re
from typing import Final

MAX_WRITTEN_OUT: Final = 20_000
_PART = re.compile(r"\\.|\(|\)|\{\s*(\d{1,9})?\s*,?\s*(\d{1,9})?\s*\}", re.DOTALL)


def written_out(text: str) -> int:
    """The largest product of nested repeats. Other text is read as if it were a
    regular expression, which makes it no longer than it is."""
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
            last *= max(int(part[1] or 1), int(part[2] or 1))
        else:
            last = 1
        if part[0] != "(":
            open_groups[-1] = max(open_groups[-1], last)
        largest = max(largest, last)
    return largest
