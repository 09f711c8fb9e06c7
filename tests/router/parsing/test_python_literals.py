"""Calls in Python's syntax: their arguments are JSON, whatever they hold and however the text is cut."""

import ast
import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from router.parsing.events import Arguments, CallBegun, Event, Text, joined
from router.parsing.families import TOOL_FAMILIES
from router.parsing.parser import Parser
from router.parsing.python_literals import MAX_DEPTH
from tests.router.parsing.calls import counted_calls

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
KEYS = st.text() | st.integers() | st.booleans() | st.none()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=12,
)


def parser() -> Parser:
    return Parser(TOOL_FAMILIES["pythonic"], None, lambda: "id", {})


def parsed(text: str, size: int) -> list[Event]:
    ours = parser()
    events = [event for at in range(0, len(text), size) for event in ours.push(text[at : at + size])]
    return joined(events + ours.end(cut=False))


@settings(max_examples=150, deadline=None)
@given(first=VALUES, second=VALUES, size=st.integers(1, 40))
def test_every_literal_is_its_json(first: Any, second: Any, size: int) -> None:
    events = parsed(f"[f(a={first!r}, b =( {second!r} ) )]", size)
    assert events[0] == CallBegun(0, "id", "f")
    (arguments,) = events[1:]
    assert isinstance(arguments, Arguments)
    assert json.loads(arguments.text) == json.loads(json.dumps({"a": first, "b": second}))


@pytest.mark.parametrize("value", ["len(a)", "[1 2]", "{1, 2}", "{'a'}", "b'a'", "1j", "a", "[1", "{'a': 1]", "'a' 1"])
def test_what_is_no_literal_becomes_text_after_the_name(value: str) -> None:
    events = parsed(f"[f(a={value})]", 3)
    assert events[0] == CallBegun(0, "id", "f")
    assert isinstance(events[-1], Text)


@pytest.mark.parametrize(
    "written",
    [
        r"'\n\t\\\'\"\x41\u00e9\U0001f389\101\0\N{DIGIT ONE}'",
        r"r'\n\''",
        "'a' \"b\"\n'c'",
        "'''a\n'b''c'''",
        "''",
        '""',
        r"'\ud83d\ude00'",
        "'a\\\nb'",
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_texts_are_read_as_python_reads_them(written: str, size: int) -> None:
    (_, arguments) = parsed(f"[f(a={written})]", size)
    assert isinstance(arguments, Arguments)
    assert json.loads(arguments.text) == json.loads(json.dumps({"a": ast.literal_eval(f"({written})")}))


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1])
def test_brackets_nest_up_to_a_limit(depth: int) -> None:
    events = parsed(f"[f(a={'[' * depth}{']' * depth})]", 5)
    assert isinstance(events[-1], Arguments if depth == MAX_DEPTH else Text)


@pytest.mark.parametrize("unit", ["1,", "[],", "'ab',", "{'a': 1},", "(1,),"])
def test_no_piece_of_a_long_argument_costs_more_than_a_first_one(unit: str) -> None:
    """In calls: a list of 40,000 characters was read at once when it closed."""
    text = "[f(a=[" + unit * (40_000 // len(unit)) + "])]"
    ours, costs = parser(), list[int]()
    with counted_calls() as calls:
        for at in range(0, len(text), 20):
            calls.number = 0
            ours.push(text[at : at + 20])
            costs.append(calls.number)
    assert max(costs) <= 2 * max(costs[:10])
