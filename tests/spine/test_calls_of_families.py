"""Calls and formats of five families, whose tokens have their own flags, through the whole service."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.scripted_families import FAMILIES
from tests.scripted_model import AFTER_TOOL, write_scripted_model
from tests.service import running_service

PATHS: Any = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
    "required": ["path", "line"],
    "additionalProperties": False,
}
FIND: Any = {"type": "function", "function": {"name": "find", "parameters": PATHS, "strict": True}}
NAMED: Any = {"type": "function", "function": {"name": "find"}}
SCHEMA: Any = {"type": "object", "properties": {"found": {"type": "boolean"}}, "required": ["found"]}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
GIVEN = '{"path": "a.py", "line": 3}'
CALLS = {  # a thought, a call, what stands before an answer that has a format
    "qwen3": (
        "<think>\nWhere is it?\n</think>\n\n",
        f'<tool_call>\n{{"name": "find", "arguments": {GIVEN}}}\n</tool_call>',
        "<think>\nThere.\n</think>\n\n",
    ),
    "llama3": ("", f'{{"name": "find", "parameters": {GIVEN}}}', ""),
    "mistral": ("", f"[TOOL_CALLS]find[ARGS]{GIVEN}", ""),
    "deepseek": (
        "Where is it?\n</think>\n\n",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{GIVEN}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
    ),
    "harmony": (
        "<|channel|>analysis<|message|>Where is it?<|end|><|start|>assistant",
        f"<|channel|>commentary to=functions.find <|constrain|>json<|message|>{GIVEN}<|call|>",
        "<|channel|>final<|message|>",
    ),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_model_of_the_family_calls_and_then_answers_in_the_format(tmp_path: Path, name: str) -> None:
    thought, call, before = CALLS[name]
    scripts = {AFTER_TOOL: f'{before}{{"found": true}}', "true": thought + call}
    model = write_scripted_model(tmp_path, scripts, FAMILIES[name])
    async with (
        running_service(model, 1, 1) as service,
        openai.AsyncOpenAI(base_url=f"{service.http_url}/v1", api_key="none", timeout=60) as client,
    ):
        asked: dict[str, Any] = {"model": (await client.models.list()).data[0].id, "tools": [FIND], "max_tokens": 300}
        messages: list[Any] = [{"role": "user", "content": "Find it."}]
        for more in (
            {},
            {"tool_choice": "required"},
            {"tool_choice": NAMED},
            {"response_format": FORMAT},
            {"response_format": FORMAT, "tool_choice": "required"},
        ):
            whole: Any = await client.chat.completions.create(messages=messages, **asked, **more)
            message = whole.choices[0].message
            assert whole.choices[0].finish_reason == "tool_calls", (more, message)
            assert [one.function.name for one in message.tool_calls] == ["find"]
            assert json.loads(message.tool_calls[0].function.arguments) == json.loads(GIVEN)
            assert bool(thought) is bool(getattr(message, "reasoning_content", None))
        calls = [one.model_dump() for one in message.tool_calls]
        messages.append({"role": "assistant", "content": message.content, "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": "there"})
        final: Any = await client.chat.completions.create(messages=messages, response_format=FORMAT, **asked)
        assert json.loads(final.choices[0].message.content or "null") == {"found": True}, final
        assert final.choices[0].finish_reason == "stop"
