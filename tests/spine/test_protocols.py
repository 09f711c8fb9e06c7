"""Every protocol through the whole service, by a model that knows nothing of them."""

import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.service import running_service
from tests.tiny_model import write_tiny_model

TEMPLATE = (
    "{{ tools | tojson }}{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    "{% if enable_thinking %}<think>\n{% endif %}"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"day": {"enum": ["today", "tomorrow"]}, "hours": {"type": "integer", "maximum": 24, "minimum": 0}},
    "required": ["day", "hours"],
    "additionalProperties": False,
}
BUDGET, MAX_TOKENS = 7, 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = write_tiny_model(tmp_path_factory.mktemp("protocols") / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


async def test_tools_are_called_and_thinking_ends_over_every_protocol(model: Path) -> None:
    parsers = {"tool_parser": "hermes", "reasoning_parser": "think"}
    async with (
        running_service(model, 1, 1, {"router": parsers}) as service,
        openai.AsyncOpenAI(base_url=f"{service.http_url}/v1", api_key="none", timeout=60) as gpt,
        anthropic.AsyncAnthropic(base_url=service.http_url, api_key="none", timeout=60) as claude,
        httpx.AsyncClient(base_url=service.http_url, timeout=60) as http,
    ):
        name = (await gpt.models.list()).data[0].id
        await _response(gpt, name)
        await _message(claude, name)
        await _budget(http, name)


async def _response(client: openai.AsyncOpenAI, model: str) -> None:
    tool: Any = {"type": "function", "name": "rain", "parameters": SCHEMA}
    async with client.responses.stream(
        model=model,
        input="Rain?",
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=400,
        extra_body={"thinking_token_budget": BUDGET},
    ) as stream:
        response = await stream.get_final_response()
    (call,) = [item for item in response.output if item.type == "function_call"]
    _check(json.loads(call.arguments))
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
    again = await client.responses.create(
        model=model, input=result, previous_response_id=response.id, max_output_tokens=5
    )
    assert again.usage is not None
    assert response.usage is not None
    assert again.usage.output_tokens <= 5


async def _message(client: anthropic.AsyncAnthropic, model: str) -> None:
    async with client.messages.stream(
        model=model,
        max_tokens=400,
        messages=[{"role": "user", "content": "Rain?"}],
        tools=[{"name": "rain", "input_schema": SCHEMA}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        extra_body={"thinking_token_budget": BUDGET},
    ) as stream:
        message = await stream.get_final_message()
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use"
    _check(call.input)


def _check(given: dict[str, Any]) -> None:
    assert given["day"] in ("today", "tomorrow")
    assert 0 <= given["hours"] <= 24


async def _budget(http: httpx.AsyncClient, model: str) -> None:
    """The tokens before the end of the thinking are those of an answer without a budget, and those behind it are those
    of a prompt that has all the tokens before them."""
    greedy = {"model": model, "temperature": 0, "return_token_ids": True}
    chat = greedy | {
        "messages": [{"role": "user", "content": "Rain?"}],
        "max_tokens": MAX_TOKENS,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    free = (await http.post("/v1/chat/completions", json=chat)).json()
    asked = {"thinking_token_budget": BUDGET, "prompt_logprobs": 0}
    bound = (await http.post("/v1/chat/completions", json=chat | asked)).json()
    prompt, output = bound["prompt_token_ids"], bound["choices"][0]["token_ids"]
    assert [list(map(int, told or ())) for told in bound["prompt_logprobs"]] == [[], *([one] for one in prompt[1:])]
    assert output[:BUDGET] == free["choices"][0]["token_ids"][:BUDGET]
    assert bound["choices"][0]["message"]["reasoning"].endswith("\n")
    ending = {"prompt": "\n</think>\n\n", "add_special_tokens": False}
    end = (await http.post("/tokenize", json=ending)).json()["tokens"]
    begun = output[: BUDGET + len(end)]
    assert begun[BUDGET:] == end
    rest = greedy | {"prompt": prompt + begun, "max_tokens": MAX_TOKENS - len(begun)}
    completed = (await http.post("/v1/completions", json=rest)).json()
    assert output[len(begun) :] == completed["choices"][0]["token_ids"]
    assert bound["usage"]["completion_tokens"] == len(output)
