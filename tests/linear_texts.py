"""Hostile texts, and whether a reader of them takes longer than their length says."""

import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

SHORTEST, LONGEST = 16, 4096  # characters
SIGNS = (" ", "\\", '"', "{", "[", "(", "0", "a")
END = "\0"  # what no pattern wants
MOST_BEGINNINGS = 4
PER_CHAR_S = 0.12e-6  # of a processor, in compiled code; what takes less is linear
ANYWAY_S = 30e-6
MOST_GROWTH = 2.9  # when a text doubles; twice is linear, fourfold is quadratic
ROUNDS = 6  # all of which must say so, because a busy machine makes single times longer

Text = Callable[[int], str]
"""A text of about so many characters."""


def hostile_texts(units: Sequence[str]) -> Iterator[Text]:
    """A beginning, then one or two units again and again, then an end."""
    for unit in units:
        for begin, end in itertools.product(("", *units[:MOST_BEGINNINGS]), ("", END)):
            yield partial(_repeated, begin, unit, end)
    for pair in itertools.permutations(units, 2):
        yield partial(_repeated, "", "".join(pair), END)


def _repeated(begin: str, unit: str, end: str, length: int) -> str:
    return begin + unit * (length // len(unit) + 1) + end


def superlinear(
    read: Callable[[Any], object], text: Callable[[int], Any], per_char_s: float = PER_CHAR_S, longest: int = LONGEST
) -> str:
    """What shows that `read` takes more than twice as long for twice the text; empty: it does not."""
    length = SHORTEST
    while length <= longest:
        usual_s = per_char_s * length + ANYWAY_S
        for _ in range(ROUNDS):
            if (whole_s := _cpu_s(read, text(length))) <= usual_s:
                break
            if whole_s <= MOST_GROWTH * (half_s := _cpu_s(read, text(length // 2))):
                break
        else:
            shown = text(SHORTEST)[:60]
            return f"{shown!r}...: {length // 2} characters take {half_s:.2g} s, twice as many {whole_s:.2g} s"
        length *= 2
    return ""


def _cpu_s(read: Callable[[Any], object], text: Any) -> float:
    began_s = time.thread_time()
    read(text)
    return time.thread_time() - began_s


def alphabet(pattern: "re.Pattern[Any]", most: int = 8) -> list[str]:
    """What the pattern is made of: its longer texts, its characters, and one of each of its sets."""
    parser: Any = re._parser  # type: ignore[attr-defined]
    source = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    flags = pattern.flags if isinstance(pattern.pattern, str) else pattern.flags | re.ASCII
    found: dict[str, None] = {}
    for run in _runs(parser.parse(source, flags & ~re.DEBUG)):
        found |= dict.fromkeys((run, run[:1]))
    return list(dict.fromkeys((*list(found)[:most], *SIGNS)))


def _runs(tree: Any) -> Iterator[str]:
    """Texts of a parsed pattern that stand in one piece."""
    run = ""
    for kind, value in tree:
        name = str(kind)
        if name == "LITERAL":
            run += chr(value)
            continue
        if run:
            yield run
        run = ""
        if name == "IN":
            yield from _of_set(value)
        elif name == "NOT_LITERAL":
            yield chr(value)
        else:
            yield from itertools.chain.from_iterable(map(_runs, _inner(value)))
    if run:
        yield run


def _of_set(members: Any) -> Iterator[str]:
    for kind, value in members:
        match str(kind):
            case "LITERAL":
                yield chr(value)
            case "RANGE":
                yield chr(value[0])
            case "CATEGORY":
                yield {"SPACE": " ", "DIGIT": "0"}.get(str(value).rpartition("_")[2], "a")


def _inner(value: Any) -> Iterator[Any]:
    """Patterns within an operation of a pattern."""
    if isinstance(value, re._parser.SubPattern):  # type: ignore[attr-defined]
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _inner(one)
