"""What parsing costs, counted in calls and in characters: a longer text costs no more per character."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from router.parsing import reader
from router.parsing.events import Arguments, CallBegun, Event, Reasoning, Text, joined
from router.parsing.families import REASONING_FAMILIES, TOOL_FAMILIES
from router.parsing.parser import Parser
from tests.router.parsing.calls import counted_calls

SHORT, LONG = 1000, 4000  # characters, about
MOST_GROWTH = 1.25  # of the cost per character; a quadratic cost would be fourfold
AROUND = 300  # of the cost: beginnings and ends
PIECES = (1, 7, LONG + 1000)  # characters that come at a time
MARKS = "<tool_call> <|python_tag|> [TOOL_CALLS] <｜tool▁calls▁begin｜> <think> </think> <function=f> <parameter=a>"
UNITS = (*MARKS.split(), *"\"\\[]{}(),;< \n1'", '{"name": "f", "arguments": {', '{"a":', "f(a=", "ab")


class Counted(str):
    """Adds up how many characters are copied out of it and behind it."""

    copied = 0

    def __getitem__(self, key: Any) -> str:
        part = super().__getitem__(key)
        Counted.copied += len(part)
        return Counted(part)

    def __add__(self, other: str) -> str:
        Counted.copied += len(self) + len(other)
        return Counted(super().__add__(other))


class CountedPattern:
    """Adds up how many characters it looks at."""

    def __init__(self, pattern: "re.Pattern[str]") -> None:
        self._pattern = pattern

    def search(self, text: str, at: int) -> "re.Match[str] | None":
        found = self._pattern.search(text, at)
        Counted.copied += (found.end() if found else len(text)) - at
        return found


def cost(family: str, text: str, piece: int) -> int:
    """Calls, and characters that were copied or searched, while a text comes in pieces and events are joined."""
    parser = Parser(TOOL_FAMILIES[family], REASONING_FAMILIES["think"], lambda: "id", {})
    parser._reader._text = Counted(parser._reader._text)
    Counted.copied = 0
    with counted_calls() as calls:
        for begin in range(0, len(text), piece):
            joined(parser.push(text[begin : begin + piece]))
        joined(parser.end(cut=False))
    return calls.number + Counted.copied


def written(before: str, unit: str, after: str, num_chars: int) -> str:
    """About `num_chars` characters: `before`, then `unit` again and again, then as many times `after`."""
    times = num_chars // max(1, len(unit + after))
    return before + unit * times + after * times


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Callable[[tuple[str, ...]], re.Pattern[str]] = reader._any_of
    monkeypatch.setattr(reader, "_any_of", lambda marks: CountedPattern(plain(marks)))


def assert_linear(family: str, before: str, unit: str, after: str, piece: int) -> None:
    texts = [written(before, unit, after, num_chars) for num_chars in (SHORT, LONG)]
    short, long = (cost(family, text, piece) for text in texts)
    assert long <= MOST_GROWTH * short * len(texts[1]) / max(1, len(texts[0])) + AROUND


@pytest.mark.parametrize("family", TOOL_FAMILIES)
@settings(max_examples=15, deadline=None)
@given(parts=st.tuples(*[st.lists(st.sampled_from(UNITS), max_size=3).map("".join)] * 3), piece=st.sampled_from(PIECES))
def test_a_character_costs_the_same_in_a_long_text(family: str, parts: tuple[str, str, str], piece: int) -> None:
    assert_linear(family, *parts, piece)


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("family", TOOL_FAMILIES)
def test_marks_calls_and_deep_brackets_cost_what_their_length_says(family: str, piece: int) -> None:
    opens = "".join(TOOL_FAMILIES[family].opens)
    for before, unit, after in (
        ("", opens or "[", ""),
        ("", opens + '{"name": "f", "arguments": {}};', ""),
        (opens + '{"name": "f", "arguments": {"a": ', "[", "]"),
        (opens + "f[ARGS]{", '"\\"', ""),
        ("[f(a=", "[", "]"),
        ("", "<tool_call", ""),
    ):
        assert_linear(family, before, unit, after, piece)


def test_joining_pieces_copies_no_text_again_and_again() -> None:
    Counted.copied = 0
    events: list[Event] = [Text(Counted("<mark>")) for _ in range(100)]
    events += [
        Reasoning(Counted("so")),
        CallBegun(0, "id", "f"),
        Arguments(0, Counted("{")),
        Arguments(0, Counted("}")),
    ]
    events += [Arguments(1, Counted("{}")), Text(Counted("."))]
    whole = [Text("<mark>" * 100), Reasoning("so"), CallBegun(0, "id", "f"), Arguments(0, "{}"), Arguments(1, "{}")]
    assert joined(events) == [*whole, Text(".")]
    assert Counted.copied <= sum(len(event.text) for event in events if not isinstance(event, CallBegun))
