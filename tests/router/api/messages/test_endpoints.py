"""The Messages API as Anthropic's client sees it, over the real router code and answers that are given."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from router.api.http.server import HttpServer
from runtime.security.bearer_keys import BearerKeys
from runtime.security.secret import Secret
from tests.router.api.conversations import (
    CALL,
    FIND_SCHEMA,
    THOUGHT,
    Rain,
    answers,
    prompt_of,
    serving,
    talking_frontend,
)
from tests.router.http_client import USER
from tests.router.scripted_generator import MODEL, ScriptedGenerator

FIND: Any = {"name": "find", "description": "Finds.", "input_schema": FIND_SCHEMA}
STOP: Any = {"type": "custom", "name": "stop", "input_schema": {"type": "object"}}
BAD: Any = {
    "name": "bad",
    "input_schema": {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}},
}
ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 500, "messages": [{"role": "user", "content": "Rain?"}]}
KEY = "sesame-sesame-sesame"


def client_of(server: HttpServer, key: str = "none") -> anthropic.AsyncAnthropic:
    url = f"http://127.0.0.1:{server.port}"
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0, timeout=60)


@pytest.fixture
async def client(server: HttpServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with client_of(server) as client:
        yield client


async def test_models_have_the_fields_of_both_apis(client: anthropic.AsyncAnthropic) -> None:
    (listed,) = [model async for model in client.models.list()]
    assert listed == await client.models.retrieve(listed.id)
    assert (listed.type, listed.display_name) == ("model", listed.id)
    assert listed.created_at.timestamp() == listed.model_dump()["created"]
    assert listed.model_dump()["object"] == "model"


async def test_a_message_has_thinking_text_and_calls_as_blocks(
    client: anthropic.AsyncAnthropic, generator: ScriptedGenerator
) -> None:
    message = await client.messages.create(**ASKED, system="Be brief.", tools=[FIND, STOP])
    thought, text, call = message.content
    assert (thought.type, text.type, call.type) == ("thinking", "text", "tool_use")
    assert (thought.thinking, text.text) == ("So be it.", "Let me see.\n")  # type: ignore[union-attr]
    assert (call.name, call.input) == ("find", {"q": "café {"})  # type: ignore[union-attr]
    assert (message.role, message.type, message.stop_reason, message.model) == (
        "assistant",
        "message",
        "tool_use",
        MODEL,
    )
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (len(generator.requests[0].prompt) - 16, 16)
    assert usage.output_tokens == len(generator.answers[0])
    assert usage.output_tokens_details is not None
    assert 0 < usage.output_tokens_details.thinking_tokens < usage.output_tokens
    told = prompt_of(generator)
    assert '"name": "find", "description": "Finds."' in told
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nRain?<|im_end|>" in told


BLOCKS = r"(content_block_start (content_block_delta )*content_block_stop )*"
TEXTS = [THOUGHT, "Plain.", f"{CALL}\n{CALL}\nDone.", "<think>So.</think>", "", "<tool_call>no"]


@pytest.mark.parametrize("text", TEXTS)
async def test_a_streamed_message_tells_its_blocks_in_order_and_adds_up_to_the_whole(
    client: anthropic.AsyncAnthropic, http: httpx.AsyncClient, generator: ScriptedGenerator, text: str
) -> None:
    answers(generator, text)
    whole = await client.messages.create(**ASKED, tools=[FIND])
    async with client.messages.stream(**ASKED, tools=[FIND]) as stream:
        final = await stream.get_final_message()
    assert said(final) == said(whole)
    assert (final.usage, final.stop_reason) == (whole.usage, whole.stop_reason)
    answer = await http.post("/v1/messages", json=ASKED | {"tools": [FIND], "stream": True})
    events = [dict(line.split(": ", 1) for line in event.split("\n")) for event in answer.text.split("\n\n")[:-1]]
    assert all(json.loads(event["data"])["type"] == event["event"] for event in events)
    names = "".join(event["event"] + " " for event in events)
    assert re.fullmatch(f"message_start ping {BLOCKS}message_delta message_stop ", names)


def said(message: Any) -> list[dict[str, Any]]:
    return [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]


async def test_blocks_become_the_messages_that_the_chat_api_would_have(
    client: anthropic.AsyncAnthropic, generator: ScriptedGenerator
) -> None:
    turns: Any = [
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "So"},
                {"type": "tool_use", "id": "a", "name": "find", "input": {"q": "x"}},
                {"type": "tool_use", "id": "b", "name": "stop", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "found"},
                {
                    "type": "tool_result",
                    "tool_use_id": "b",
                    "content": [{"type": "text", "text": "done"}],
                    "is_error": True,
                },
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    await client.messages.create(model=MODEL, max_tokens=5, messages=turns, system=[{"type": "text", "text": "Rule."}])
    spoken = [
        *("system\nRule.", "user\nOne\ntwo", 'assistant\n(Hm.)Sofind:{"q": "x"}stop:{}', "tool\nfound", "tool\ndone"),
        "user\nGo on.",
    ]
    told = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in spoken)
    assert prompt_of(generator) == f"{told}<|im_start|>assistant\n"


async def test_what_a_message_says_can_be_sent_back(
    client: anthropic.AsyncAnthropic, generator: ScriptedGenerator
) -> None:
    message = await client.messages.create(**ASKED, tools=[FIND])
    result: Any = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": "never"}  # type: ignore[union-attr]
    turns: Any = [
        *ASKED["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    await client.messages.create(model=MODEL, max_tokens=5, messages=turns, tools=[FIND])
    assert 'assistant\n(So be it.)Let me see.\nfind:{"q": "café {"}<|im_end|>\n<|im_start|>tool\nnever' in prompt_of(
        generator
    )


async def test_a_stop_sequence_is_named(client: anthropic.AsyncAnthropic, generator: ScriptedGenerator) -> None:
    answers(generator, "One two three")
    for tools in ([], [FIND]):
        message = await client.messages.create(**ASKED, stop_sequences=["four", " th"], tools=tools)
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " th")
        assert [block.text for block in message.content] == ["One two"]  # type: ignore[union-attr]
    ended = await client.messages.create(**ASKED, stop_sequences=["four"])
    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)


async def test_max_tokens_beyond_the_window_is_cut_to_it_and_said(
    client: anthropic.AsyncAnthropic, generator: ScriptedGenerator
) -> None:
    answers(generator, "x" * 5000)
    message = await client.messages.create(**ASKED | {"max_tokens": 10**6})
    (request,) = generator.requests
    room = generator.limits().max_model_len - len(request.prompt)
    assert request.sampling[0].max_tokens == room
    assert message.usage.to_dict()["max_tokens"] == message.usage.output_tokens == room
    assert message.stop_reason == "model_context_window_exceeded"
    whole = await client.messages.create(**ASKED)
    assert "max_tokens" not in whole.usage.to_dict()
    assert whole.stop_reason == "max_tokens"


async def test_half_a_call_is_none(client: anthropic.AsyncAnthropic, generator: ScriptedGenerator) -> None:
    cut = len(generator.answers[0]) - 25
    whole = await client.messages.create(**ASKED | {"max_tokens": cut}, tools=[FIND])
    assert whole.stop_reason == "max_tokens"
    assert [block.type for block in whole.content] == ["thinking", "text"]
    async with client.messages.stream(**ASKED | {"max_tokens": cut}, tools=[FIND]) as stream:
        final = await stream.get_final_message()
    assert final.stop_reason == "max_tokens"


async def test_a_schema_is_parsed_into_its_type(client: anthropic.AsyncAnthropic, generator: ScriptedGenerator) -> None:
    answers(generator, '{"day": "today", "hours": 3}')
    message = await client.messages.parse(**ASKED, output_format=Rain)
    assert message.parsed_output == Rain(day="today", hours=3)
    grammar = generator.requests[0].sampling[0].grammar
    assert grammar is not None
    assert json.loads(grammar.text)["properties"].keys() == {"day", "hours"}


async def test_options_reach_the_engine(client: anthropic.AsyncAnthropic, generator: ScriptedGenerator) -> None:
    marked: Any = [{"type": "text", "text": "Rule.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    await client.messages.create(
        **ASKED, system=marked, thinking={"type": "enabled", "budget_tokens": 1024},
        tools=[FIND | {"cache_control": {"type": "ephemeral"}}, STOP],
        tool_choice={"type": "tool", "name": "stop", "disable_parallel_tool_use": True},
        extra_body={"seed": 7, "top_k": 3, "top_p": 0.25, "temperature": 0.5},
    )  # fmt: skip
    (asked,) = generator.requests
    assert asked.parsing is not None
    assert asked.parsing.thinking_tokens == 1024
    sampling = asked.sampling[0]
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.top_k) == (0.5, 0.25, 7, 3)
    assert (asked.hint.keep_s, sampling.max_tokens) == (3600, 500)
    assert prompt_of(generator).endswith("assistant\nTrue")
    assert sampling.grammar is not None
    assert "stop" in sampling.grammar.text
    assert "find" not in sampling.grammar.text
    await client.messages.create(**ASKED, thinking={"type": "disabled"}, cache_control={"type": "ephemeral"})
    assert prompt_of(generator).endswith("assistant\nFalse")
    assert generator.requests[-1].hint.keep_s == 300


async def test_an_assistants_turn_at_the_end_is_continued(
    client: anthropic.AsyncAnthropic, generator: ScriptedGenerator
) -> None:
    begun: Any = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "The answer is"}]
    await client.messages.create(**ASKED | {"messages": begun})
    assert prompt_of(generator).endswith("<|im_start|>assistant\nThe answer is")


async def test_an_effort_reaches_the_template(client: anthropic.AsyncAnthropic, generator: ScriptedGenerator) -> None:
    for effort in ("low", "high"):
        config: Any = {"effort": effort}
        await client.messages.create(**ASKED, output_config=config)
        assert prompt_of(generator).endswith(f"assistant\n{effort}")


async def test_what_may_be_left_out_of_a_conversation_is_kept(
    client: anthropic.AsyncAnthropic, generator: ScriptedGenerator
) -> None:
    edits: Any = [
        {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 1}},
        {"type": "clear_thinking_20251015", "keep": "all"},
    ]
    await client.messages.create(**ASKED)
    await client.messages.create(**ASKED, extra_body={"context_management": {"edits": edits}})
    plain, managed = generator.requests
    assert managed.prompt.tolist() == plain.prompt.tolist()


async def test_tokens_are_counted_as_the_message_would_have_them(
    client: anthropic.AsyncAnthropic, generator: ScriptedGenerator
) -> None:
    told: Any = {"model": MODEL, "messages": ASKED["messages"], "system": "Be brief.", "tools": [FIND]}
    counted = await client.messages.count_tokens(**told)
    assert not generator.requests
    await client.messages.create(**told, max_tokens=5)
    assert counted.input_tokens == len(generator.requests[0].prompt)
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.role"):
        await client.messages.count_tokens(model=MODEL, messages=[{"role": "ghost", "content": "a"}])  # type: ignore[typeddict-item]


def said_by(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [*blocks]}, {"role": "user", "content": "a"}]}


CALLED = {"id": "a", "name": "b", "input": {}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", **CALLED}]}]}, "messages"),
    ({"messages": [{"role": "ghost", "content": "a"}]}, "messages[0].role"),
    (said_by("user", {"type": "image", "source": {}}), "messages[0].content[0].source"),
    (said_by("user", {"type": "tool_use", "id": "a", "name": "b", "input": {}}), "messages[0].content[0].type"),
    (said_by("user", {"type": "text"}), "messages[0].content[0].text"),
    (said_by("user", {"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
    (said_by("assistant", {"type": "tool_use", "id": "a", "name": "b", "input": [1]}), "messages[0].content[0].input"),
    (said_by("user", {"type": "text", "text": "a", "x": 1}), "messages[0].content[0].x"),
    (
        said_by("user", {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1y"}}),
        "messages[0].content[0].cache_control.ttl",
    ),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"mesages": []}, "mesages"),
    ({"tools": [{"type": "web_search_20250305", "name": "a"}]}, "tools[0].type"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "a", "input_schema": []}]}, "tools[0].input_schema"),
    ({"tools": [FIND, FIND]}, "tools[1].name"),
    ({"tools": [FIND | {"cache_control": {"ttl": "1y"}}]}, "tools[0].cache_control.ttl"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tools": [FIND], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ({"thinking": {"type": "deep"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "strin"}}}},
        "output_config.format.schema",
    ),
    ({"tools": [FIND, BAD], "tool_choice": {"type": "any"}}, "tools[1].input_schema"),
    ({"container": "a"}, "container"),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0].type"),
    ({"context_management": {"edit": []}}, "context_management.edit"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"stop_sequences": [""]}, "stop_sequences"),
]


async def test_bad_requests_are_refused_by_name_in_anthropics_form(http: httpx.AsyncClient) -> None:
    for body, field in REFUSED:
        answer = await http.post("/v1/messages", json=ASKED | body)
        told = answer.json()
        assert (answer.status_code, told["type"], told["error"]["type"]) == (400, "error", "invalid_request_error"), (
            body
        )
        assert told["error"]["message"].startswith(f"{field}: "), told
    wrong = await http.post("/v1/messages", json=ASKED | {"model": "another"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (404, "not_found_error")


async def test_a_key_is_shown_in_either_header(generator: ScriptedGenerator, folder: Path) -> None:
    async with serving(talking_frontend(generator, folder), keys=BearerKeys.plain([Secret(KEY)])) as server:
        async with client_of(server, KEY) as client:
            assert (await client.messages.create(**ASKED)).type == "message"
        url = f"http://127.0.0.1:{server.port}/v1"
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            shown = {"x-api-key": KEY}
            assert (await http.post("/messages", json=ASKED, headers=shown)).status_code == 200
            assert (await http.get("/models", headers=shown)).status_code == 200
            for wrong in ({}, {"x-api-key": "another"}, {"x-api-key": KEY, "authorization": "Bearer another"}):
                for path, body in (("/messages", ASKED), ("/messages/count_tokens", {"messages": USER})):
                    refused = await http.post(path, json=body, headers=wrong)
                    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/messages"), ("POST", "/v1/messages/batches")])
async def test_what_is_not_there_is_refused_in_the_form_of_the_protocol(
    server: HttpServer, method: str, path: str
) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as http:
        refused = (await http.request(method, path)).json()
    assert refused["type"] == "error"
    assert refused["error"]["message"].startswith(f"{method} {path}: ")
