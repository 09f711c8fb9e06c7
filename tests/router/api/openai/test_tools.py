"""Tools and reasoning as OpenAI's client sees them, over the real router code and answers that are given."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from router.parsing.parsing import ModelFamilies, model_families
from tests.router.api.conversations import answers, openai_client, prompt_of, serving, write_talking_model
from tests.router.http_client import CHAT, USER
from tests.router.scripted_generator import MODEL, ScriptedGenerator, make_frontend, tiny_tokenizer

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}:{{ call.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n{{ reasoning_effort }}"
    "{% if enable_thinking is defined %}<think>\n{% endif %}"
)
FIND: Any = {"type": "function", "function": {"name": "find", "parameters": {"properties": {"q": {"type": "string"}}}}}
STOP: Any = {"type": "function", "function": {"name": "stop"}}
TOOLS: Any = [FIND, STOP]
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "caf\u00e9 {"}}\n</tool_call>'
CALLS = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "stop", "arguments": {{}}}}\n</tool_call>'
CUT = '<tool_call>{"name": "find", "arguments": {"q": oops}}</tool_call>'
THOUGHT = f"<think>So.</think>\n\n{CALL}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talking_model(tmp_path_factory.mktemp("tools"), TEMPLATE)


@pytest.fixture
def generator(folder: Path) -> ScriptedGenerator:
    return ScriptedGenerator(tiny_tokenizer(folder), [CALLS])


async def streamed(client: openai.AsyncOpenAI, **asked: Any) -> dict[str, Any]:
    """The deltas of an answer, added up."""
    stream = await client.chat.completions.create(
        model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}, **asked
    )
    whole: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    async for chunk in stream:
        if chunk.usage is not None:
            whole["usage"] = chunk.usage
        for choice in chunk.choices:
            delta: Any = choice.delta
            whole["content"] += delta.content or ""
            whole["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
            for piece in delta.tool_calls or ():
                if piece.id is not None:
                    assert piece.index == len(whole["tool_calls"])
                    whole["tool_calls"].append([piece.function.name, ""])
                whole["tool_calls"][piece.index][1] += piece.function.arguments
            whole["finish_reason"] = choice.finish_reason
    return whole


@pytest.mark.parametrize("text", [CALLS, THOUGHT, "No call < at all.", "<tool_call>none"])
async def test_a_streamed_answer_is_the_whole_one(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator, text: str
) -> None:
    answers(generator, text)
    whole = await client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS)
    (choice,) = whole.choices
    message: Any = choice.message
    calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or ()]
    pieces = await streamed(client, tools=TOOLS)
    assert pieces["tool_calls"] == calls
    assert (pieces["content"] or None) == (message.content or None)
    assert pieces["reasoning_content"] == (getattr(message, "reasoning_content", None) or "")
    assert pieces["finish_reason"] == choice.finish_reason == ("tool_calls" if calls else "stop")
    assert pieces["usage"] == whole.usage
    for _, arguments in calls:
        json.loads(arguments)


async def test_calls_stand_apart_from_the_text(client: openai.AsyncOpenAI, generator: ScriptedGenerator) -> None:
    (choice,) = (await client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS)).choices
    calls: Any = choice.message.tool_calls
    assert choice.message.content == "Let me see.\n"
    assert [(call.type, call.function.name) for call in calls] == [("function", "find"), ("function", "stop")]
    assert json.loads(calls[0].function.arguments) == {"q": "café {"}
    assert len({call.id for call in calls}) == 2
    assert '"name": "find"' in prompt_of(generator)
    first = await client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS, parallel_tool_calls=False)
    assert len(first.choices[0].message.tool_calls or ()) == 1


async def test_the_one_call_that_is_wanted_is_the_first_that_is_whole(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator
) -> None:
    answers(generator, f'{CUT}<tool_call>{{"name": "stop", "arguments": {{}}}}</tool_call>')
    answer = await client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS, parallel_tool_calls=False)
    (choice,) = answer.choices
    calls: Any = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["stop"]
    assert choice.finish_reason == "tool_calls"


async def test_reasoning_is_told_apart_and_counted(client: openai.AsyncOpenAI, generator: ScriptedGenerator) -> None:
    answers(generator, "I wonder.</think>\n\nYes.")
    more = {"chat_template_kwargs": {"enable_thinking": True}}
    whole = await client.chat.completions.create(model=MODEL, messages=USER, extra_body=more)
    message: Any = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("I wonder.", "Yes.")
    assert message.reasoning == message.reasoning_content
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    thought = len(generator.tokenizer.encode("I wonder.</think>"))
    assert abs((whole.usage.completion_tokens_details.reasoning_tokens or 0) - thought) <= 1
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}
    answers(generator, "I wonder.</think>{}")
    formatted = await client.chat.completions.create(
        model=MODEL, messages=USER, extra_body=more | {"response_format": schema}
    )
    message = formatted.choices[0].message
    assert (message.reasoning_content, message.content) == ("I wonder.", "{}")


async def test_without_tools_and_with_choice_none_a_call_is_text(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator
) -> None:
    for asked in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = (await client.chat.completions.create(model=MODEL, messages=USER, **asked)).choices  # type: ignore[call-overload]
        assert choice.message.content == CALLS
        assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
        assert '"name": "find"' not in prompt_of(generator)


async def test_a_call_that_is_cut_off_is_dropped(client: openai.AsyncOpenAI, generator: ScriptedGenerator) -> None:
    answers(generator, CALL)
    cut = len(generator.answers[0]) - 25
    whole = await client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS, max_tokens=cut)
    assert (whole.choices[0].finish_reason, whole.choices[0].message.tool_calls) == ("length", None)


async def test_a_required_call_is_a_matter_of_grammar(client: openai.AsyncOpenAI, generator: ScriptedGenerator) -> None:
    await client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS, tool_choice="required")
    named: Any = {"type": "function", "function": {"name": "stop"}}
    await client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS, tool_choice=named)
    both, one = (request.sampling[0].grammar for request in generator.requests)
    assert both is not None
    assert one is not None
    assert "find" in both.text
    assert "stop" in both.text
    assert "find" not in one.text
    assert "stop" in one.text


async def test_strict_tools_are_a_matter_of_grammar_among_free_text(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator
) -> None:
    strict: Any = {"type": "function", "function": FIND["function"] | {"strict": True}}
    await client.chat.completions.create(model=MODEL, messages=USER, tools=[strict, STOP])
    schema: Any = {"type": "json_object"}
    await client.chat.completions.create(model=MODEL, messages=USER, tools=[strict], response_format=schema)
    free, given = (request.sampling[0].grammar for request in generator.requests)
    assert free is not None
    assert "find" in free.text
    assert "stop" in free.text
    assert given is not None
    assert given.kind == "json_object"
    assert "find" in given.around
    assert "@format" in given.around


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_some_of_the_tools_may_be_called(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator, mode: str
) -> None:
    some: Any = {"mode": mode, "tools": [{"type": "function", "function": {"name": "stop"}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": some}
    await client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS, tool_choice=choice)
    grammar = generator.requests[-1].sampling[0].grammar
    assert grammar is not None
    assert "stop" in grammar.text
    assert "find" not in grammar.text
    assert '"name": "find"' in prompt_of(generator), "the prompt, and so its cache, is that of all tools"


async def test_calls_and_their_results_are_sent_back(client: openai.AsyncOpenAI, generator: ScriptedGenerator) -> None:
    call = {"id": "abc", "type": "function", "function": {"name": "find", "arguments": '{"q": "x"}'}}
    messages: Any = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "So."}
        | {"provider_specific_fields": {"a": 1}, "thinking_blocks": []},
        {"role": "tool", "tool_call_id": "abc", "content": "found"},
    ]
    await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    assert 'assistant\nfind:{"q": "x"}<|im_end|>\n<|im_start|>tool\nfound<|im_end|>' in prompt_of(generator)


async def test_a_budget_ends_the_reasoning(client: openai.AsyncOpenAI, generator: ScriptedGenerator) -> None:
    answers(generator, "I wonder, and wonder.")
    more = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 2}
    whole = await client.chat.completions.create(model=MODEL, messages=USER, extra_body=more)
    message: Any = whole.choices[0].message
    begun = generator.tokenizer.decode(generator.answers[0][:2])
    assert message.reasoning_content == f"{begun}\n"
    assert message.content == "I wonder, and wonder.".removeprefix(begun).lstrip()
    plain = await client.chat.completions.create(model=MODEL, messages=USER, extra_body={"thinking_token_budget": 2})
    assert plain.choices[0].message.content == "I wonder, and wonder.", "nothing opens the reasoning"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"thinking_token_budget": 0}, "thinking_token_budget"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "web"}]}, "tools[0].type"),
    ({"tools": [FIND, FIND]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [STOP] * 129}, "tools"),
    ({"tools": [STOP | {"x": "x" * 140_000}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [STOP], "tool_choice": "any"}, "tool_choice"),
    *(
        (
            {"tools": [STOP], "tool_choice": {"type": "allowed_tools", "allowed_tools": some}},
            f"tool_choice.allowed_tools.{field}",
        )
        for some, field in (
            (None, "mode"),
            ({"mode": "none"}, "mode"),
            ({"mode": "auto", "tools": []}, "tools"),
            ({"mode": "auto", "tools": [{"type": "function", "function": {"name": "x"}}]}, "tools[0]"),
        )
    ),
    ({"tools": [STOP], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[1"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
]


@pytest.mark.parametrize("wish", [{"tool_choice": "required"}, {"tools": "strict"}])
async def test_what_of_a_tools_schema_cannot_be_followed_is_named(
    http: httpx.AsyncClient, wish: dict[str, Any]
) -> None:
    parameters = {
        "type": "object",
        "properties": {"when": {"type": "array", "items": {"type": "string", "pattern": "(?=a)"}}},
    }
    bad = {"type": "function", "function": {"name": "bad", "parameters": parameters, "strict": "tools" in wish}}
    answer = await http.post("/v1/chat/completions", json=CHAT | wish | {"tools": [FIND, bad]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools[1].function.parameters")
    assert "$.properties.when.items.pattern: regex parse error" in error["message"]


async def test_tools_that_are_too_much_together_are_refused_in_our_words(http: httpx.AsyncClient) -> None:
    wide = {"type": "object", "properties": {f"p{i}": {} for i in range(20)}}
    tools = [{"type": "function", "function": {"name": f"tool{i}", "parameters": wide}} for i in range(64)]
    answer = await http.post("/v1/chat/completions", json=CHAT | {"tools": tools, "tool_choice": "required"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools")
    assert "give fewer tools, or simpler schemas" in error["message"]


@pytest.mark.parametrize(("effort", "shown"), [("high", "high"), ("none", "none<think>")])
async def test_an_effort_reaches_the_template(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator, effort: Any, shown: str
) -> None:
    """`none` says enable_thinking: false, too, which this template shows."""
    await client.chat.completions.create(model=MODEL, messages=USER, reasoning_effort=effort)
    assert prompt_of(generator).endswith(f"assistant\n{shown.replace('<think>', '<think>' + chr(10))}")
    overruled: Any = {"chat_template_kwargs": {"reasoning_effort": "mine"}}
    await client.chat.completions.create(model=MODEL, messages=USER, reasoning_effort=effort, extra_body=overruled)
    assert "assistant\nmine" in prompt_of(generator)


async def test_bad_tools_are_refused_by_name(http: httpx.AsyncClient) -> None:
    for body, field in REFUSED:
        answer = await http.post("/v1/chat/completions", json=CHAT | body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), body


FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
TORN = '{"q": "<think>no</think><tool_call>none"}'


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"<think>So.</think>\n\n{CALL}\n{CALL}", "So.", None, 2),
        (CALL, None, None, 1),
        (f"<think>So.</think>\n\n{TORN}", "So.", TORN, 0),
        (TORN, None, TORN, 0),
    ],
)
async def test_with_a_format_an_answer_calls_tools_or_has_the_format(
    client: openai.AsyncOpenAI,
    generator: ScriptedGenerator,
    text: str,
    reasoning: str | None,
    content: str | None,
    calls: int,
) -> None:
    answers(generator, text)
    whole = await client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS, response_format=FORMAT)
    message: Any = whole.choices[0].message
    assert getattr(message, "reasoning_content", None) == reasoning
    assert (message.content or None) == content
    assert len(message.tool_calls or ()) == calls


async def test_with_a_format_a_required_call_is_a_call_alone(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator
) -> None:
    asked: Any = {"tools": TOOLS, "tool_choice": "required", "response_format": FORMAT}
    await client.chat.completions.create(model=MODEL, messages=USER, **asked)
    grammar = generator.requests[-1].sampling[0].grammar
    assert grammar is not None
    assert (grammar.kind, grammar.around) == ("ebnf", "")


async def test_a_model_whose_template_knows_no_tools_is_told_of_them_as_text(tiny_model: Path) -> None:
    generator = ScriptedGenerator(tiny_tokenizer(tiny_model))
    added = generator.tokenizer.matched_tokens, generator.tokenizer.hidden_token_ids
    families = model_families("auto", "auto", generator.tokenizer.chat_template, False, *added)
    frontend = replace(make_frontend(generator), families=families)
    call = {"id": "abc", "type": "function", "function": {"name": "find", "arguments": '{"q": "x"}'}}
    turns: Any = [{"role": "assistant", "content": "Hm.", "tool_calls": [call]}]
    turns += [{"role": "tool", "tool_call_id": "abc", "content": text} for text in ("found", "more")]
    answers(generator, CALL)
    async with serving(frontend) as server, openai_client(server) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=[*USER, *turns], tools=TOOLS)
    assert len(answer.choices[0].message.tool_calls or ()) == 1
    system, _, assistant, results, _ = prompt_of(generator).split("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\n")
    assert '"name": "stop"' in system
    assert "<tool_call>" in system
    assert assistant.endswith('Hm.\n<tool_call>\n{"name": "find", "arguments": {"q": "x"}}\n</tool_call>')
    told = [f"<tool_response>\n{text}\n</tool_response>" for text in ("found", "more")]
    assert results == f"<|im_start|>user\n{told[0]}\n{told[1]}"


async def test_tools_in_a_form_that_nothing_tells_the_model_are_refused(tiny_model: Path) -> None:
    generator = ScriptedGenerator(tiny_tokenizer(tiny_model))
    frontend = replace(make_frontend(generator), families=ModelFamilies("pythonic", tells_tools=False))
    async with serving(frontend) as server, httpx.AsyncClient(timeout=60) as http:
        url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
        answer = await http.post(url, json=CHAT | {"tools": TOOLS})
    assert answer.status_code == 400
    assert "knows no tools" in answer.json()["error"]["message"]
