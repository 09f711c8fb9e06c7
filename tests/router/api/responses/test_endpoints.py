"""The Responses API as OpenAI's client sees it, over the real router code and answers that are given."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from router.api.responses.store import ResponseStore
from runtime.errors import UnavailableError
from runtime.security.bearer_keys import BearerKeys
from runtime.security.callers import parse_callers
from tests.router.api.conversations import (
    CALL,
    FIND_SCHEMA,
    THOUGHT,
    Rain,
    answers,
    openai_client,
    prompt_of,
    serving,
    talking_frontend,
)
from tests.router.scripted_generator import MODEL, ScriptedGenerator

FIND: Any = {"type": "function", "name": "find", "description": "Finds.", "parameters": FIND_SCHEMA, "strict": False}
STOP: Any = {"type": "function", "name": "stop", "parameters": None, "strict": None}
ASKED: dict[str, Any] = {"model": MODEL, "input": "When does it rain?"}


async def test_a_response_has_reasoning_text_and_calls_as_items(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator
) -> None:
    response = await client.responses.create(**ASKED, instructions="Be brief.", tools=[FIND, STOP], metadata={"a": "b"})
    thought, message, call = response.output
    assert thought.type == "reasoning"
    assert [part.text for part in thought.content or ()] == ["So be it."]
    assert message.type == "message"
    assert response.output_text == "Let me see.\n"
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments), call.status) == ("find", {"q": "café {"}, "completed")
    assert len({item.id for item in response.output}) == 3
    assert (response.status, response.object, response.error) == ("completed", "response", None)
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    assert [tool.type for tool in response.tools] == ["function", "function"]
    assert response.usage is not None
    prompt = generator.requests[0].prompt
    assert (response.usage.input_tokens, response.usage.input_tokens_details.cached_tokens) == (len(prompt), 16)
    assert response.usage.output_tokens == len(generator.answers[0])
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    told = prompt_of(generator)
    assert '"name": "find", "description": "Finds."' in told
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhen does it rain?<|im_end|>" in told


ITEM = (
    r"output_item\.added "
    r"(content_part\.added ((output|reasoning)_text\.delta )+(output|reasoning)_text\.done content_part\.done "
    r"|(function_call_arguments\.delta )+function_call_arguments\.done )"
    r"output_item\.done "
)
TEXTS = [THOUGHT, "Plain.", f"{CALL}\n{CALL}\nDone.", "<think>So.</think>", "", "<tool_call>no"]


@pytest.mark.parametrize("text", TEXTS)
async def test_a_streamed_response_tells_its_items_in_order_and_adds_up_to_the_whole(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator, text: str
) -> None:
    answers(generator, text)
    whole = await client.responses.create(**ASKED, tools=[FIND])
    async with client.responses.stream(**ASKED, tools=[FIND]) as stream:
        events: list[Any] = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == [*range(len(events))]
    names = "".join(event.type.removeprefix("response.") + " " for event in events)
    assert re.fullmatch(f"created in_progress ({ITEM})*completed ", names)
    assert said(final) == said(whole)
    assert final.usage == whole.usage
    written = ["" for _ in final.output]
    for event in events:
        if event.type.endswith(".delta"):
            assert event.item_id == final.output[event.output_index].id
            written[event.output_index] += event.delta
        elif event.type == "response.output_item.done":
            assert event.item.id == final.output[event.output_index].id
    assert written == [text for _, text in said(whole)]


def said(response: Any) -> list[tuple[str, str]]:
    """The kind of each item, and its text."""
    return [
        (item.type, item.arguments if item.type == "function_call" else item.content[0].text)
        for item in response.output
    ]


async def test_a_schema_is_parsed_into_its_type(client: openai.AsyncOpenAI, generator: ScriptedGenerator) -> None:
    answers(generator, '{"day": "today", "hours": 3}')
    response = await client.responses.parse(**ASKED, text_format=Rain)
    assert response.output_parsed == Rain(day="today", hours=3)
    grammar = generator.requests[0].sampling[0].grammar
    assert grammar is not None
    assert json.loads(grammar.text)["properties"].keys() == {"day", "hours"}
    async with client.responses.stream(**ASKED, text_format=Rain) as stream:
        assert (await stream.get_final_response()).output_parsed == Rain(day="today", hours=3)


async def test_items_become_the_messages_that_the_chat_api_would_have(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator
) -> None:
    said = [
        {"role": "developer", "content": "Rule."},
        {"role": "user", "content": [{"type": "input_text", "text": "One"}, {"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So", "annotations": []}]},
        {"type": "function_call", "call_id": "a", "name": "find", "arguments": '{"q": "x"}', "id": "fc_1"},
        {"type": "function_call", "call_id": "b", "name": "stop", "arguments": ""},
        {"type": "function_call_output", "call_id": "a", "output": "found"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "stopped"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "Well."}]},
        {"role": "assistant", "content": "Then."},
    ]
    await client.responses.create(model=MODEL, input=said)  # type: ignore[arg-type]
    turns = [
        *(
            "system\nRule.",
            "user\nOne\ntwo",
            'assistant\n(Hm.)Sofind:{"q": "x"}stop:{}',
            "tool\nfound",
            "tool\nstopped",
        ),
        *("assistant\nWell.", "assistant\nThen."),
    ]
    told = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
    assert prompt_of(generator) == f"{told}<|im_start|>assistant\n"


async def test_a_conversation_goes_on_from_a_kept_response(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator
) -> None:
    first = await client.responses.create(**ASKED, instructions="Be brief.", tools=[FIND])
    (call,) = [item for item in first.output if item.type == "function_call"]
    found: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "never"}]
    answers(generator, "Never.")
    stream = await client.responses.create(model=MODEL, input=found, previous_response_id=first.id, stream=True)
    second: Any = [event async for event in stream][-1]
    assert second.response.previous_response_id == first.id
    third = await client.responses.create(model=MODEL, input="Sure?", previous_response_id=second.response.id)
    turns = [
        *("user\nWhen does it rain?", 'assistant\n(So be it.)Let me see.\nfind:{"q": "café {"}', "tool\nnever"),
        *("assistant\nNever.", "user\nSure?"),
    ]
    told = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
    assert prompt_of(generator) == f"{told}<|im_start|>assistant\n", "instructions are of one response"
    kept = await client.responses.retrieve(third.id)
    with pytest.raises(openai.BadRequestError, match="stream: is not supported for a response that is kept"):
        await client.responses.retrieve(third.id, stream=True)
    assert (kept.output_text, kept.id, kept.usage) == ("Never.", third.id, third.usage)
    await client.responses.delete(third.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(third.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.delete(third.id)


async def test_tokens_are_counted_as_the_response_would_have_them(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator
) -> None:
    first = await client.responses.create(**ASKED)
    more: dict[str, Any] = {"model": MODEL, "input": "Sure?", "previous_response_id": first.id, "tools": [FIND]}
    counted = await client.responses.input_tokens.count(**more)
    assert len(generator.requests) == 1
    await client.responses.create(**more)
    assert counted.input_tokens == len(generator.requests[-1].prompt)
    with pytest.raises(openai.BadRequestError, match="is not here"):
        await client.responses.input_tokens.count(**more | {"previous_response_id": "resp_none"})


async def test_what_is_not_kept_is_refused_by_name(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator, folder: Path
) -> None:
    unkept = await client.responses.create(**ASKED, store=False)
    with pytest.raises(openai.BadRequestError, match="is not here") as caught:
        await client.responses.create(**ASKED, previous_response_id=unkept.id)
    assert caught.value.param == "previous_response_id"
    async with (
        serving(talking_frontend(generator, folder), ResponseStore(0, 60.0)) as server,
        openai_client(server) as none,
    ):
        assert (await none.responses.create(**ASKED)).status == "completed"
        for more in ({"store": True}, {"previous_response_id": unkept.id}):
            with pytest.raises(openai.BadRequestError, match="response_store_bytes is 0"):
                await none.responses.create(**ASKED, **more)  # type: ignore[arg-type]


async def test_nobody_goes_on_from_the_responses_of_another_tenant(generator: ScriptedGenerator, folder: Path) -> None:
    keys = BearerKeys(parse_callers("first-key-of-many tenant=a\nother-key-of-many tenant=b\n", "test"))
    async with (
        serving(talking_frontend(generator, folder), keys=keys) as server,
        openai_client(server, "first-key-of-many") as owner,
        openai_client(server, "other-key-of-many") as other,
    ):
        kept = await owner.responses.create(**ASKED)
        assert (await owner.responses.retrieve(kept.id)).id == kept.id
        with pytest.raises(openai.BadRequestError):
            await other.responses.create(**ASKED, previous_response_id=kept.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(kept.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.delete(kept.id)
        async with openai_client(server, "no-key-at-all-of-ours") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.responses.create(**ASKED)


async def test_a_response_that_is_cut_off_is_incomplete_and_has_no_call(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator
) -> None:
    cut = len(generator.answers[0]) - 25
    whole = await client.responses.create(**ASKED, tools=[FIND], max_output_tokens=cut)
    stream = await client.responses.create(**ASKED, tools=[FIND], max_output_tokens=cut, stream=True)
    events: list[Any] = [event async for event in stream]
    for response in (whole, events[-1].response):
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert [item.type for item in response.output] == ["reasoning", "message"]
    assert events[-1].type == "response.incomplete"
    done = [event.item.type for event in events if event.type == "response.output_item.done"]
    assert done == ["reasoning", "message"], "nobody may make half a call"


async def test_what_follows_a_broken_call_has_places_of_its_own(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator
) -> None:
    broken = '<tool_call>\n{"name": "find", "arguments": {"q": nope}}\n</tool_call>'
    answers(generator, f"{broken}\n{CALL}")
    whole = await client.responses.create(**ASKED, tools=[FIND])
    assert [item.type for item in whole.output] == ["message", "function_call"]
    async with client.responses.stream(**ASKED, tools=[FIND]) as stream:
        added = [event async for event in stream if event.type == "response.output_item.added"]
    assert [(event.output_index, event.item.type) for event in added] == [
        (0, "function_call"),
        (1, "message"),
        (2, "function_call"),
    ]
    assert [item.type for item in (await stream.get_final_response()).output] == ["message", "function_call"]


async def test_options_reach_the_engine(client: openai.AsyncOpenAI, generator: ScriptedGenerator) -> None:
    answers(generator, "Well.")
    named: Any = {"type": "function", "name": "stop"}
    response = await client.responses.create(
        **ASKED, temperature=0.5, top_p=0.25, top_logprobs=2, include=["message.output_text.logprobs"],
        reasoning={"effort": "none"}, prompt_cache_retention="24h", tools=[FIND, STOP], tool_choice=named,
        extra_body={"seed": 7, "top_k": 3, "chat_template_kwargs": {"enable_thinking": True}},
    )  # fmt: skip
    (asked,) = generator.requests
    sampling = asked.sampling[0]
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.top_k) == (0.5, 0.25, 7, 3)
    assert (response.temperature, response.top_p) == (0.5, 0.25)
    assert asked.hint.keep_s == 3600, "of 24 hours, as long as the router allows"
    assert prompt_of(generator).endswith("assistant\nnoneTrue"), "the caller's own variables go before"
    assert sampling.grammar is not None
    assert "stop" in sampling.grammar.text
    assert "find" not in sampling.grammar.text
    message: Any = response.output[0]
    tokens = message.content[0].logprobs
    assert "".join(token.token for token in tokens).startswith("Well.")
    assert {len(token.top_logprobs) for token in tokens} == {2}


async def test_some_of_the_tools_may_be_called(client: openai.AsyncOpenAI, generator: ScriptedGenerator) -> None:
    some: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "stop"}]}
    await client.responses.create(**ASKED, tools=[FIND, STOP], tool_choice=some)
    await client.responses.create(**ASKED, tools=[FIND | {"strict": True}, STOP])
    some_grammar, strict_grammar = (request.sampling[0].grammar for request in generator.requests)
    assert some_grammar is not None
    assert "find" not in some_grammar.text
    assert strict_grammar is not None
    assert '"q"' in strict_grammar.text


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
    ({"input": [{"role": "ghost", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "function_call", "name": "a"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "name": "a", "call_id": "b", "arguments": "[1"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
    ({"inptu": "a"}, "inptu"),
    ({"input": [{"role": "user", "content": "a", "x": 1}, {"type": "tool"}]}, "input[1].type"),
    ({"client_headers": {}, "temprature": 1}, "temprature"),
    ({"client_headers": {}, "max_tokens": 1}, "max_tokens"),
    ({"text": {"x": 1}}, "text.x"),
    ({"tools": [{"name": "a"}]}, "tools[0].type"),
    ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools"),
    ({"tools": [{"type": "namespace", "name": "a", "tools": [FIND, FIND]}]}, "tools[0].tools[1].name"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [FIND], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    (
        {"tools": [{"type": "web_search"}, FIND | {"strict": True, "parameters": {"type": "object", "not": {}}}]},
        "tools[1].parameters",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [FIND, FIND]}, "tools[1].name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [FIND], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [FIND], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
    ({"tools": [FIND], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "strin"}}}}, "text.format.schema"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"echo": True}, "echo"),
    ({"truncation": "auto"}, "truncation"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"metadata": {str(i): "a" for i in range(17)}}, "metadata"),
    ({"temperature": 3}, "temperature"),
    ({"priority": 1}, "priority"),
]


async def test_bad_requests_are_refused_by_name(http: httpx.AsyncClient) -> None:
    for body, field in REFUSED:
        answer = await http.post("/v1/responses", json=ASKED | body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), (body, answer.text)


PATCH: Any = {
    "type": "custom",
    "name": "patch",
    "description": "Edits.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'},
}
AGENTS: Any = {"type": "namespace", "name": "agents", "description": "Others.", "tools": [FIND, PATCH]}
CALLS = (
    '<tool_call>\n{"name": "patch", "arguments": {"input": "*** café\\n\\"}"}}\n</tool_call>'
    '<tool_call>\n{"name": "agents.find", "arguments": {"q": "a"}}\n</tool_call>'
)


async def test_custom_tools_and_namespaces_are_called_as_the_client_names_them(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator
) -> None:
    answers(generator, CALLS)
    asked: Any = {**ASKED, "tools": [PATCH, AGENTS]}
    whole = await client.responses.create(**asked)
    patch, find = [item.to_dict() for item in whole.output]
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", '*** café\n"}')
    assert (find["type"], find["name"], find["namespace"]) == ("function_call", "find", "agents")
    prompt = prompt_of(generator)
    for told in ('"name": "patch"', "Edits.", "form lark", 'start: \\"a\\"', '"agents.find"', '"agents.patch"'):
        assert told in prompt
    stream = await client.responses.create(**asked, stream=True)
    events: list[Any] = [event async for event in stream]
    texts = [event for event in events if "custom_tool_call_input" in event.type]
    assert [texts[0].delta, texts[1].input] == [patch["input"]] * 2
    assert [item.to_dict() | {"id": ""} for item in events[-1].response.output] == [
        item | {"id": "", "call_id": new.call_id}
        for item, new in zip((patch, find), events[-1].response.output, strict=True)
    ]
    outputs = [
        {"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "done"},
        {"type": "function_call_output", "call_id": find["call_id"], "output": "found"},
    ]
    await client.responses.create(**asked | {"input": outputs}, previous_response_id=whole.id)
    from_kept = prompt_of(generator)
    user = {"role": "user", "content": ASKED["input"]}
    await client.responses.create(**asked | {"input": [user, patch, find, *outputs]}, store=False)
    assert prompt_of(generator) == from_kept
    assert 'patch:{"input": "*** café\\n\\"}"}agents.find:{"q": "a"}' in from_kept
    only: Any = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "custom", "name": "patch"}, {"type": "mcp"}],
    }
    narrowed = await client.responses.create(**asked, tool_choice=only)
    assert narrowed.to_dict()["warnings"][0]["param"] == "tool_choice.tools"
    grammar = generator.requests[-1].sampling[0].grammar
    assert grammar is not None
    assert "agents" not in grammar.text


async def test_what_clients_bring_that_has_no_part_in_an_answer_is_left_out_with_a_warning(
    http: httpx.AsyncClient, generator: ScriptedGenerator
) -> None:
    call = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "a"}}
    message = {"role": "user", "content": [{"type": "input_text", "text": "Hi", "origin": 1}], "turn": 2}
    body = {"model": MODEL, "input": [call, message], "tools": [{"type": "web_search"}, FIND]}
    told = await http.post("/v1/responses", json=body | {"client_metadata": {"a": "b"}, "x_turn": 1})
    assert told.status_code == 200, told.text
    warned = {each["param"]: each["message"] for each in told.json()["warnings"]}
    assert set(warned) == {"tools[0]", "input[0]", "x_turn"}
    assert "web_search" in warned["tools[0]"]
    plain = body | {"input": "Hi", "tools": [FIND], "client_metadata": {"a": "b"}}
    prompt = prompt_of(generator)
    assert "warnings" not in (await http.post("/v1/responses", json=plain)).json()
    assert prompt_of(generator) == prompt


async def test_a_response_that_fails_says_so_in_its_last_event(
    client: openai.AsyncOpenAI, generator: ScriptedGenerator
) -> None:
    generator.error, generator.error_at = UnavailableError("all workers are gone"), 5
    stream = await client.responses.create(**ASKED, stream=True)
    events: list[Any] = [event async for event in stream]
    assert events[-1].type == "response.failed"
    failed = events[-1].response
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    assert "all workers are gone" in failed.error.message


async def test_a_conversation_is_charged_while_it_is_answered_and_gone_when_its_answer_fails(
    generator: ScriptedGenerator, folder: Path
) -> None:
    store, generator.stuck_at = ResponseStore(1 << 20, 60.0), 4
    call = {"type": "function_call", "call_id": "c", "name": "n", "arguments": json.dumps({"a": [[]] * 1000})}
    asked = ASKED | {"input": [call, {"type": "function_call_output", "call_id": "c", "output": "d"}]}
    async with serving(talking_frontend(generator, folder), store) as server, openai_client(server) as client:
        async with client.responses.stream(**asked) as stream:
            await anext(aiter(stream))
            assert store.num_bytes > 64_000, "each list takes 64 bytes"
            assert not store.get((await anext(aiter(stream))).response.id, "")
        async with asyncio.timeout(60):
            await generator.cancelled.wait()
        generator.error, generator.stuck_at = UnavailableError("all workers are gone"), None
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(**asked)
        generator.error = None  # whose traceback knows the answer
        async with asyncio.timeout(60):
            while store.num_bytes:
                await asyncio.sleep(0.01)
