"""Forms in which models write calls beside their family's plain one, and what is no call after all."""

import json
from typing import Any

import pytest

from router.parsing.events import Arguments, CallBegun, CallCut, Event, Reasoning, Text, joined
from router.parsing.families import REASONING_FAMILIES, TOOL_FAMILIES, TOOL_SIGNS, recognised
from router.parsing.parser import Parser
from tests.router.parsing.test_parser import calls, numbered_ids, parsed

LLAMA = '{"type": "function", "name": "find", "parameters": {"n": 3}}'
FORMS = [
    ("llama3_json", LLAMA),
    ("llama3_json", f"\n\n{LLAMA}"),
    ("llama3_json", '{ "name": "find", "parameters": {"n": 3}}'),
    ("llama3_json", json.dumps(json.loads(LLAMA), indent=2)),
    ("pythonic", "\n[find(n=3)]"),
    ("pythonic", "<|python_start|>[find(n=3)]<|python_end|>"),
    ("mistral", '[TOOL_CALLS]find[CALL_ID]123456789[ARGS]{"n": 3}'),
    ("harmony", '<|channel|>analysis to=functions.find <|constrain|>json<|message|>{"n": 3}<|call|>'),
    ("hermes", '<tool_call>{"name": "find", "arguments": "{\\"n\\": 3}"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"n": 3}, "parameters": {"n": 4}, "name": "find"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"n": 3}, "name": "stop"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"n": 3}</tool_call>'),
]


@pytest.mark.parametrize(("family", "text"), FORMS)
def test_what_models_write_beside_the_plain_form_is_a_call(family: str, text: str) -> None:
    for pieces in ([text], list(text)):
        events = parsed(family, pieces)
        assert calls(events) == [("find", {"n": 3})]
        assert not [event for event in events if isinstance(event, Text | CallCut)]


def test_arguments_that_are_null_are_an_empty_object() -> None:
    assert calls(parsed("hermes", ['<tool_call>{"name": "f", "arguments": null}</tool_call>'])) == [("f", {})]


@pytest.mark.parametrize(
    "text",
    ['{"answer": 1, "name": "f"}', '{"id": 7, "name": "f", "price": 3}', "\n\n{x", "  \n", '{"name": 1}', " [1, 2]"],
)
@pytest.mark.parametrize("family", ["llama3_json", "pythonic"])
def test_text_that_begins_like_a_call_stays_as_it_is(family: str, text: str) -> None:
    assert parsed(family, list(text)) == [Text(text)]


@pytest.mark.parametrize("size", [1, 1000])
def test_a_constraint_of_the_final_channel_is_no_part_of_the_text(size: int) -> None:
    thought = "<|channel|>analysis<|message|>So.<|end|>"
    text = thought + '<|start|>assistant<|channel|>final <|constrain|>json<|message|>{"a": 1}'
    parser = Parser(TOOL_FAMILIES["harmony"], REASONING_FAMILIES["harmony"], numbered_ids("h"))
    events = [event for at in range(0, len(text), size) for event in parser.push(text[at : at + size])]
    assert joined(events + parser.end(cut=False)) == [Reasoning("So."), Text('{"a": 1}')]


MALFORMED = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": nope}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "text"}</tool_call>'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": NaN}'),
    ("pythonic", "[f(a=1e999)]"),
    ("pythonic", f"[f(a={'1+' * 50_000}1)]"),
]


@pytest.mark.parametrize(("family", "text"), MALFORMED, ids=range(len(MALFORMED)))
def test_a_call_whose_arguments_are_no_json_is_cut_and_is_text(family: str, text: str) -> None:
    parser = Parser(TOOL_FAMILIES[family], None, numbered_ids("r"))
    events = joined(parser.push(text) + parser.end(cut=False))
    assert isinstance(events[0], CallBegun)
    assert next(event for event in events if not isinstance(event, CallBegun | Arguments)) == CallCut(0)
    assert text.endswith("".join(event.text for event in events if isinstance(event, Text)))
    assert parser.num_calls == 0


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a'),
        ("pythonic", "[f(a='b"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>b"),
    ],
)
def test_a_call_that_the_model_or_a_stop_string_leaves_unfinished_is_cut_and_stays_text(family: str, text: str) -> None:
    parser = Parser(TOOL_FAMILIES[family], None, numbered_ids("r"))
    assert (parser.push(text) + parser.end(cut=False))[-2:] == [CallCut(0), Text(text)]
    assert parser.num_calls == 0


XML: list[tuple[Any, str, Any]] = [
    ({"type": "boolean"}, "True", True),
    ({"type": ["boolean", "null"]}, "None", None),
    ({"type": ["string", "null"]}, "5", "5"),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, '"5"', "5"),
    ({"type": ["string", "integer"]}, "5", 5),
    ({"type": "number"}, "5", 5),
    ({"type": "number"}, "NaN", "NaN"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "5", "5"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"type": "array"}, '\n[1, "</parameter>"]\n', [1, "</parameter>"]),
    ({}, "5", 5),
]


@pytest.mark.parametrize(("schema", "text", "value"), XML)
def test_the_schema_says_what_a_value_in_xml_is(schema: Any, text: str, value: Any) -> None:
    tools = {"f": {"type": "object", "properties": {"a": schema}}}
    call = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    for pieces in ([call], list(call)):
        parser = Parser(TOOL_FAMILIES["qwen3_coder"], None, numbered_ids("r"), tools)
        events = [event for piece in pieces for event in parser.push(piece)]
        (found,) = calls(joined(events + parser.end(cut=False)))
        assert found == ("f", {"a": value})
        assert type(found[1]["a"]) is type(value)


LONG = "ab " * 20_000
STREAMED = [
    ("pythonic", f"[f(a='{LONG}')]", {}),
    ("qwen3_coder", f'<tool_call><function=f><parameter=a>["{LONG}"]</parameter></function></tool_call>', "array"),
    ("qwen3_coder", f'<tool_call><function=f><parameter=a>{{"b": "{LONG}"}}</parameter></function>', "object"),
]


@pytest.mark.parametrize(("family", "text", "kind"), STREAMED, ids=["text", "list", "object"])
def test_long_arguments_come_in_pieces(family: str, text: str, kind: Any) -> None:
    parser = Parser(TOOL_FAMILIES[family], None, numbered_ids("r"), {"f": {"properties": {"a": {"type": kind}}}})
    events: list[Event] = []
    for at in range(0, len(text), 50):
        events += parser.push(text[at : at + 50])
    events += parser.end(cut=False)
    assert max(len(event.text) for event in events if isinstance(event, Arguments)) < 100
    assert LONG in json.dumps(calls(events)[0][1])


def test_a_template_that_asks_for_pythonic_calls_is_known() -> None:
    template = "put it in the format of [func_name1(params_name1=params_value1, params_name2=params_value2...)]"
    assert recognised(TOOL_SIGNS, template, {"<|python_tag|>"}) == "pythonic"
