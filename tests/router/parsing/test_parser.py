import json
from collections.abc import Callable
from itertools import count
from typing import get_args

import pytest
from hypothesis import given, settings, strategies as st

from router.parsing.events import Arguments, CallBegun, CallCut, Event, Reasoning, Text, joined
from router.parsing.families import REASONING_FAMILIES, TOOL_FAMILIES, TOOL_SIGNS, recognised
from router.parsing.parser import Parser
from runtime.config.serving import ReasoningParser, ToolParser


def numbered_ids(prefix: str) -> Callable[[], str]:
    numbers = count()
    return lambda: f"call_{prefix}_{next(numbers)}"


SCHEMAS = {
    "find": {
        "type": "object",
        "properties": {"text": {"type": "string"}, "n": {"type": "integer"}, "l": {"type": "array"}},
    }
}
ARGUMENTS = {"text": 'a "b" \\ {[ü🎉]} </tool_call> ```\n', "n": 3}
JSON = json.dumps({"name": "find", "arguments": ARGUMENTS}, ensure_ascii=False)
ARGUMENTS_JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
SAFE = {"text": 'a "b" \\ {[ü🎉]}', "n": 3}

THOUGHT = "<|channel|>analysis<|message|>Let me see.<|end|>"
WRITTEN = {
    "hermes": f"<tool_call>\n{JSON}\n</tool_call>",
    "qwen3_coder": '<tool_call>\n<function=find>\n<parameter=text>\na "b" \\ {[ü🎉]}\n</parameter>\n'
    "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": f"<|python_tag|>{JSON.replace('arguments', 'parameters')}",
    "pythonic": "[find(text='a \"b\" \\\\ {[ü🎉]}', n=3)]",
    "harmony": f"<|channel|>commentary to=functions.find <|constrain|>json<|message|>{ARGUMENTS_JSON}<|call|>",
    "mistral": f"[TOOL_CALLS]find[ARGS]{ARGUMENTS_JSON}",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n"
    f"```json\n{ARGUMENTS_JSON}\n```<｜tool▁call▁end｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{ARGUMENTS_JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
}


def parsed(family: str, pieces: list[str], cut: bool = False, in_reasoning: bool = False) -> list[Event]:
    reasoning = REASONING_FAMILIES["harmony" if family == "harmony" and not in_reasoning else "think"]
    parser = Parser(TOOL_FAMILIES[family], reasoning, numbered_ids("r"), SCHEMAS, in_reasoning)
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined(events + parser.end(cut))


def calls(events: list[Event]) -> list[tuple[str, object]]:
    names = [event.name for event in events if isinstance(event, CallBegun)]
    texts = ["".join(e.text for e in events if isinstance(e, Arguments) and e.index == i) for i in range(len(names))]
    return [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]


@pytest.mark.parametrize("family", TOOL_FAMILIES)
def test_each_family_gives_the_call_that_was_written(family: str) -> None:
    thought = THOUGHT if family == "harmony" else "<think>Let me see.</think>\n\n"
    events = parsed(family, [thought + WRITTEN[family]])
    wanted = SAFE if family in ("qwen3_coder", "pythonic") else ARGUMENTS
    assert events[0] == Reasoning("Let me see.")
    assert calls(events) == [("find", wanted)] * (2 if family == "deepseek_v3" else 1)
    assert not [event for event in events if isinstance(event, Text)]


HARMONY_CALLS = [
    f"{THOUGHT}<|start|>assistant{WRITTEN['harmony']}",
    f"{THOUGHT}<|start|>assistant to=functions.find<|channel|>commentary json<|message|>{ARGUMENTS_JSON}",
    f" to=functions.find<|channel|>commentary <|constrain|>json<|message|>{ARGUMENTS_JSON}<|call|>",
]


def in_harmony(text: str, size: int, cut: bool = False) -> list[Event]:
    parser = Parser(TOOL_FAMILIES["harmony"], REASONING_FAMILIES["harmony"], numbered_ids("h"))
    events = [event for i in range(0, len(text), size) for event in parser.push(text[i : i + size])]
    return joined(events + parser.end(cut))


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_channels_of_harmony_are_told_apart(size: int) -> None:
    final = f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>Yes, it <| is.<|return|>"
    assert in_harmony(final, size) == [Reasoning("Let me see."), Text("Yes, it <| is.")]
    preamble = f"<|channel|>commentary<|message|>First.<|end|><|start|>assistant{WRITTEN['harmony']}"
    assert in_harmony(preamble, size)[0] == Text("First.")
    for text in (preamble, *HARMONY_CALLS):
        events = in_harmony(text, size)
        assert calls(events) == [("find", ARGUMENTS)]
        assert [event.text for event in events if isinstance(event, Text)] in ([], ["First."])
    half = in_harmony(HARMONY_CALLS[0][:-30], size, cut=True)
    assert isinstance(half[-1], CallCut)


@pytest.mark.parametrize("family", TOOL_FAMILIES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_cuts_of_any_text_give_the_same_events(family: str, data: st.DataObject) -> None:
    parts = [
        *REASONING_FAMILIES["harmony"].skips,
        *REASONING_FAMILIES["harmony"].heads,
        " to=functions.",
        '{ "type": "function", "name": "find", "parameters": ',
        '{"name": "f", "arguments": "{}"}',
        "[f(a='",
        "<function=find><parameter=l>[1",
        "[CALL_ID]1",
        "'" * 3,
        "\\u00",
        "<think>",
        "</think>",
        "a<",
        "\n",
        "ü",
        *WRITTEN.values(),
        '{"name"',
        "<tool_call>",
        '"}',
        "[",
        "(",
        "}",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(parts) | st.text(max_size=4), max_size=5)))
    text = text[: data.draw(st.integers(0, len(text)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    cut = data.draw(st.booleans())
    whole = parsed(family, [text], cut)
    assert parsed(family, pieces, cut) == whole
    assert parsed(family, list(text), cut) == whole


@pytest.mark.parametrize("family", TOOL_FAMILIES)
def test_a_text_without_calls_stays_as_it_is(family: str) -> None:
    assert parsed(family, ["a < b, ", "{x} [y] <tool"]) == [Text("a < b, {x} [y] <tool")]


def test_arguments_come_as_they_are_written() -> None:
    parser = Parser(TOOL_FAMILIES["hermes"], None, numbered_ids("r"))
    before = parser.push('<tool_call>\n{"name": "find", "arguments": {"text": "ab')
    assert before == [CallBegun(0, "call_r_0", "find"), Arguments(0, '{"text": "ab')]
    assert parser.push("c") == [Arguments(0, "c")]


def test_text_stands_before_between_and_after_calls() -> None:
    events = parsed("hermes", [f"One. {WRITTEN['hermes']}\ntwo {WRITTEN['hermes']} three"])
    assert [event.text for event in events if isinstance(event, Text)] == ["One. ", "two ", "three"]
    assert [event.index for event in events if isinstance(event, CallBegun)] == [0, 1]


@pytest.mark.parametrize(
    "text", ["<tool_call>no call</tool_call>", '<tool_call>{"x": 1}', '<tool_call>{"name": "a b"}']
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert parsed("hermes", list(text)) == [Text(text)]


def test_half_marks_at_the_limit_of_tokens_are_no_text() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}'
    for half in ("</tool_call", "</to", "\n</tool_call"):
        assert parsed("hermes", [call + half], cut=True) == parsed("hermes", [call], cut=True)
    assert parsed("hermes", ["A text <tool_c"], cut=True) == [Text("A text ")]
    assert parsed("hermes", ["A text <tool_c"]) == [Text("A text <tool_c")]  # the model has ended it
    assert parsed("hermes", ["if a <"], cut=True) == [Text("if a <")]
    assert parsed("hermes", ["a thought</thi"], cut=True, in_reasoning=True) == [Reasoning("a thought")]


def test_a_call_that_is_cut_off_is_dropped() -> None:
    assert parsed("hermes", ['<tool_call>{"na'], cut=True) == []
    assert parsed("hermes", ['<tool_call>{"name": "find", "arguments": {'], cut=True)[-1] == CallCut(0)


def test_reasoning_that_the_template_opened_needs_no_mark() -> None:
    events = parsed("hermes", ["so", "</thi", "nk>\n\nyes"], in_reasoning=True)
    assert events == [Reasoning("so"), Text("yes")]


def test_the_signs_of_a_model_name_its_family() -> None:
    assert recognised(TOOL_SIGNS, "<tool_call>\n<function=x", ()) == "qwen3_coder"
    assert recognised(TOOL_SIGNS, "", {"<tool_call>"}) == "hermes"
    assert recognised(TOOL_SIGNS, "plain", ()) is None


def test_many_marks_in_one_piece_stay_text() -> None:
    text = "<tool_call>" * 2000
    assert parsed("hermes", [text]) == [Text(text)]


def test_the_configuration_knows_all_families() -> None:
    assert set(get_args(ToolParser)) == {"auto", "none", *TOOL_FAMILIES}
    assert set(get_args(ReasoningParser)) == {"auto", "none", *REASONING_FAMILIES}
