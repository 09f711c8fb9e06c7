"""Tools and reasoning over gRPC, over the real router code and answers that are given."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton_proto.generated import inference_pb2 as pb
from runtime.calls.answer import Answer
from runtime.calls.router import Client
from tests.router.api.conversations import grpc_serving, prompt_of, talking_frontend, write_talking_model
from tests.router.scripted_generator import ScriptedGenerator, tiny_tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content }}{{ message.tool_call_id }}"
    "{{ message.reasoning_content }}{% for call in message.tool_calls or [] %}{{ call.id }}{{ call.function.name }}"
    "{{ call.function.arguments.q }}{% endfor %}<|im_end|>{% endfor %}{% if enable_thinking %}thinks{% endif %}"
    "{{ reasoning_effort }}{% if enable_thinking is false %}<think>{% endif %}"
)
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "café {"}}\n</tool_call>'
THOUGHT = f"<think>So.</think>Let me see.\n{CALL}\n{CALL}"
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
FIND = pb.Tool(name="find", description="Finds.", parameters=json.dumps(SCHEMA))
BAD = pb.Tool(
    name="bad", parameters='{"type": "object", "properties": {"day": {"type": "string", "pattern": "(?=a)"}}}'
)
USER = pb.ChatMessage(role="user", content="Where?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talking_model(tmp_path_factory.mktemp("tools"), TEMPLATE)


@pytest.fixture
def generator(folder: Path) -> ScriptedGenerator:
    return ScriptedGenerator(tiny_tokenizer(folder), [THOUGHT])


@pytest.fixture
async def client(generator: ScriptedGenerator, folder: Path) -> AsyncIterator[Client]:
    async with grpc_serving(talking_frontend(generator, folder)) as api, Client(f"127.0.0.1:{api.port}") as client:
        yield client


async def ask(client: Client, sampling: pb.SamplingOptions | None = None, **chat: Any) -> Answer:
    messages = chat.pop("messages", [USER])
    request = pb.GenerateRequest(chat=pb.ChatMessages(messages=messages, **chat), sampling=sampling)
    return await client.generate(request, 20)


async def test_an_answer_with_tools_has_typed_parts(client: Client, generator: ScriptedGenerator) -> None:
    answer = await ask(client, tools=[FIND])
    (choice,) = answer.choices
    assert choice.text == THOUGHT
    assert (choice.content, choice.reasoning, choice.finish_reason) == ("Let me see.\n", "So.", "tool_calls")
    assert [(call.name, json.loads(call.arguments)) for call in choice.tool_calls] == [("find", {"q": "café {"})] * 2
    assert len({call.id for call in choice.tool_calls}) == 2
    assert 0 < answer.usage.reasoning_tokens < answer.usage.completion_tokens
    shown = json.loads(prompt_of(generator).splitlines()[0])
    assert shown == {"name": "find", "description": "Finds.", "parameters": SCHEMA}


async def test_arguments_come_as_they_are_written(client: Client) -> None:
    request = pb.GenerateRequest(chat=pb.ChatMessages(messages=[USER], tools=[FIND]))
    parts = [part async for response in client.stream(request, 20) for part in response.piece.parts]
    assert sum(part.WhichOneof("kind") == "call_arguments" for part in parts) > 6


async def test_one_call_may_be_all_that_is_wanted(client: Client) -> None:
    answer = await ask(client, tools=[FIND], parallel_tool_calls=False)
    assert len(answer.choices[0].tool_calls) == 1


async def test_without_tools_parts_are_there_where_they_are_asked_for(client: Client) -> None:
    plain = await ask(client)
    assert (plain.text, plain.choices[0].content, plain.usage.reasoning_tokens) == (THOUGHT, "", 0)
    (choice,) = (await ask(client, with_parts=True)).choices
    assert (choice.reasoning, choice.content) == ("So.", f"Let me see.\n{CALL}\n{CALL}")
    assert (choice.finish_reason, choice.tool_calls) == ("stop", [])


async def test_a_tool_that_must_be_called_makes_a_grammar(client: Client, generator: ScriptedGenerator) -> None:
    for wish in ({"named_tool": "find"}, {"tool_choice": pb.TOOL_CHOICE_REQUIRED}):
        await ask(client, tools=[FIND], **wish)
        grammar = generator.requests[-1].sampling[0].grammar
        assert grammar is not None
        assert "find" in grammar.text
    await ask(client, tools=[FIND], tool_choice=pb.TOOL_CHOICE_NONE)
    assert generator.requests[-1].sampling[0].grammar is None


async def test_strict_and_allowed_tools_are_a_matter_of_grammar(client: Client, generator: ScriptedGenerator) -> None:
    def grammar() -> str:
        found = generator.requests[-1].sampling[0].grammar
        assert found is not None
        return found.text

    strict = pb.Tool(name="stop", parameters=json.dumps({"type": "object", "required": ["why"]}), strict=True)
    await ask(client, tools=[FIND, strict])
    assert '"required": ["why"]' in grammar()
    assert '"q"' not in grammar(), "of a tool that is not strict any object will do"
    await ask(client, tools=[FIND, strict], allowed_tools=["find"])
    assert "find" in grammar()
    assert "stop" not in grammar()
    await ask(client, tools=[FIND, strict], allowed_tools=["find"], tool_choice=pb.TOOL_CHOICE_REQUIRED)
    assert '"q"' in grammar()
    assert "stop" not in grammar()


async def test_a_budget_ends_the_reasoning(client: Client, generator: ScriptedGenerator) -> None:
    (choice,) = (await ask(client, thinking_token_budget=500)).choices
    parsing = generator.requests[-1].parsing
    assert parsing is not None
    assert parsing.thinking_tokens == 500
    assert choice.reasoning == "So.", "such a chat has parts"


async def test_an_effort_reaches_the_template(client: Client, generator: ScriptedGenerator) -> None:
    await ask(client, reasoning_effort="high")
    assert prompt_of(generator).endswith("<|im_end|>high")
    await ask(client, reasoning_effort="none")
    assert prompt_of(generator).endswith("<|im_end|>none<think>")


async def test_the_prompt_of_a_session_stays_cached_for_its_next_request(
    client: Client, generator: ScriptedGenerator
) -> None:
    for key, keep_s, kept_s in (("session-7", 0, 300), ("session-7", 600, 600), ("", 20, 20)):
        await client.generate(pb.GenerateRequest(text="a", prompt_cache_key=key, keep_cache_s=keep_s), 20)
        assert generator.requests[-1].hint.keep_s == kept_s


async def test_history_and_switches_reach_the_template(client: Client, generator: ScriptedGenerator) -> None:
    call = pb.ToolCall(id="id7", name="find", arguments='{"q": "x"}')
    said = pb.ChatMessage(role="assistant", reasoning="hm", tool_calls=[call])
    found = pb.ChatMessage(role="tool", content="here", tool_call_id="id7")
    await ask(client, messages=[USER, said, found], template_variables='{"enable_thinking": true}')
    user, said_text, found_text, _ = prompt_of(generator).split("<|im_end|>")
    assert (user, said_text) == ("<|im_start|>user Where?", "<|im_start|>assistant hmid7findx")
    assert (found_text, _) == ("<|im_start|>tool hereid7", "thinks")


@pytest.mark.parametrize(
    ("chat", "problem"),
    [
        ({"tools": [pb.Tool(name="a b")]}, "chat.tools[0].name: is 'a b'"),
        ({"tools": [FIND, FIND]}, "chat.tools[1].name: is 'find', as that of a tool before it"),
        ({"tool_choice": pb.TOOL_CHOICE_REQUIRED}, "tool_choice: is 'required' and there are no tools"),
        ({"named_tool": "find"}, "tool_choice.function.name: is 'find', which is none of tools"),
        ({"allowed_tools": ["find"]}, "chat.allowed_tools[0]: is 'find', which is none of tools"),
        ({"tools": [FIND], "tool_choice": 7}, "chat.tool_choice: is 7, which is none of ToolChoice"),
        ({"tools": [pb.Tool(name="a", parameters="[]")]}, "chat.tools[0].parameters: must be the JSON of an object"),
        ({"tools": [FIND] * 129}, "tools: has 129 tools; at most 128 are allowed"),
        ({"tools": [FIND], "named_tool": "other"}, "tool_choice.function.name: is 'other'"),
        ({"tools": [FIND], "allowed_tools": ["other"]}, "chat.allowed_tools[0]: is 'other'"),
        (
            {"tools": [FIND], "allowed_tools": ["find"], "named_tool": "find"},
            "chat.allowed_tools: contradicts named_tool",
        ),
        (
            {"tools": [FIND], "allowed_tools": ["find"], "tool_choice": pb.TOOL_CHOICE_NONE},
            "chat.allowed_tools: contradicts tool_choice",
        ),
        ({"thinking_token_budget": 0}, "chat.thinking_token_budget: is 0, must be at least 1"),
        (
            {"tools": [FIND, BAD], "tool_choice": pb.TOOL_CHOICE_REQUIRED},
            "chat.tools[1].parameters: cannot be used at $.properties.day.pattern: regex parse error",
        ),
        ({"template_variables": "["}, "chat.template_variables: cannot be used"),
        (
            {"messages": [pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="a", arguments="x")])]},
            "chat.messages[0].tool_calls[0].function.arguments: must be the JSON of an object",
        ),
    ],
)
async def test_what_cannot_be_used_is_refused_by_name(client: Client, chat: dict[str, Any], problem: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(client, **chat)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert problem in (caught.value.details() or "")
