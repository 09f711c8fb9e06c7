"""Calls of tools through the whole service, by a model that knows nothing of them."""

import json
from pathlib import Path

import openai

from baton import AsyncClient
from baton.client.chat import Message
from tests.service import running_service
from tests.tiny_model import write_tiny_model

TEMPLATE = "{{ tools | tojson }}{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
SCHEMA = {
    "type": "object",
    "properties": {"day": {"enum": ["today", "tomorrow"]}, "hours": {"type": "integer", "maximum": 24, "minimum": 0}},
    "required": ["day", "hours"],
    "additionalProperties": False,
}


async def test_a_required_call_always_parses(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    async with (
        running_service(model, 1, 1, {"router": {"tool_parser": "hermes"}}) as service,
        openai.AsyncOpenAI(base_url=f"{service.http_url}/v1", api_key="none", timeout=60) as client,
    ):
        for seed in range(3):
            whole = await client.chat.completions.create(
                model=(await client.models.list()).data[0].id,
                messages=[{"role": "user", "content": "When does it rain?"}],
                tools=[{"type": "function", "function": {"name": "rain", "parameters": SCHEMA}}],
                tool_choice="required",
                parallel_tool_calls=False,
                max_tokens=400,
                seed=seed,
            )
            (choice,) = whole.choices
            assert choice.finish_reason == "tool_calls"
            (call,) = choice.message.tool_calls or ()
            assert call.type == "function"
            given = json.loads(call.function.arguments)
            assert call.function.name == "rain"
            assert given["day"] in ("today", "tomorrow")
            assert 0 <= given["hours"] <= 24
        async with AsyncClient(service.grpc_address) as ours:
            tools = [{"name": "rain", "parameters": SCHEMA}]
            messages: list[Message] = [{"role": "user", "content": "When does it rain?"}]
            for _ in range(2):
                answer = await ours.chat(messages, tools=tools, named_tool="rain", max_tokens=400, seed=1)
                assert answer.finish_reason == "tool_calls"
                assert [call.name for call in answer.tool_calls] == ["rain"]
                assert set(json.loads(answer.tool_calls[0].arguments)) == {"day", "hours"}
                result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "no"}
                messages += [answer.choices[0].message(), result]
