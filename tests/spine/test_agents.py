"""Sessions as coding agents make them over all three protocols, through a whole service, by a model that knows nothing
of it: many tools, a history that grows, calls beside each other, an answer that is left in the middle."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import anthropic
import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel, Field

from baton import AsyncClient
from tests.service import Service
from tests.spine.toolbox import NAMES, PATHS, TOOLS, agent_service

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROUNDS, CANCELLED_ROUND = 8, 4
TASK, RESULT = "Mend the test. " * 10, "def f(): ...\n" * 3
TWO_CALLS = {"min_tokens": 120, "max_tokens": 600}  # one call is shorter than that


class Edit(BaseModel):
    """A line of a file."""

    path: Literal["a.py", "b.py"]
    line: Annotated[int, Field(ge=0, le=99)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    async with agent_service(tmp_path_factory.mktemp("agents")) as service:
        yield service


async def left_in_the_middle(stream: Any) -> None:
    async for _ in stream:
        break
    await stream.close()


async def answer(api: Any, final: str, turn: int, asked: dict[str, Any]) -> Any:
    """Streamed to its end, in one round after one that is left. `final`: how the client calls the whole answer."""
    if turn == CANCELLED_ROUND:
        await left_in_the_middle(await api.create(stream=True, **asked))
    async with api.stream(**asked) as stream:
        async for _event in stream:
            pass
        return await getattr(stream, final)()


def check_call(name: str, arguments: Any) -> None:
    assert name in NAMES
    assert arguments["path"] in ("a.py", "b.py")
    assert 0 <= arguments["line"] <= 99


async def chat_session(client: openai.AsyncOpenAI, model: str, seed: int) -> list[int]:
    """Calls in each round."""
    history: list[Any] = [{"role": "user", "content": TASK}]
    counts = []
    for turn in range(ROUNDS):
        asked: dict[str, Any] = {"model": model, "messages": history, "tools": TOOLS, "tool_choice": "required"}
        asked |= {"seed": seed + turn, "max_tokens": TWO_CALLS["max_tokens"], "prompt_cache_key": f"session-{seed}"}
        asked["extra_body"] = {"min_tokens": TWO_CALLS["min_tokens"]}
        message = (await answer(client.chat.completions, "get_final_completion", turn, asked)).choices[0].message
        calls = whole_calls([(call, call.function.arguments) for call in message.tool_calls or []])
        for call, arguments in calls:
            check_call(call.function.name, arguments)
        told = [
            call.model_dump(include={"id": True, "type": True, "function": {"name", "arguments"}}) for call, _ in calls
        ]
        history.append({"role": "assistant", "content": message.content, "tool_calls": told})
        history += [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call, _ in calls]
        counts.append(len(calls))
    return counts


async def responses_session(client: openai.AsyncOpenAI, model: str, seed: int) -> list[int]:
    """As Codex asks: nothing is stored, and the whole history is sent each time, reasoning included."""
    tools: list[Any] = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
    history: list[Any] = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": TASK}]}]
    counts = []
    for turn in range(ROUNDS):
        asked: dict[str, Any] = {
            "model": model, "instructions": "Be brief.", "input": history, "tools": tools, "tool_choice": "required",
            "parallel_tool_calls": True, "store": False, "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "medium", "summary": "auto"}, "text": {"verbosity": "low"},
            "prompt_cache_key": f"session-{seed}", "max_output_tokens": TWO_CALLS["max_tokens"],
            "extra_body": {"seed": seed + turn, "min_tokens": TWO_CALLS["min_tokens"]},
        }  # fmt: skip
        response = await answer(client.responses, "get_final_response", turn, asked)
        items = [item for item in response.output if item.type == "function_call"]
        calls = whole_calls([(item, item.arguments) for item in items])
        for item, arguments in calls:
            check_call(item.name, arguments)
            history.append(item.model_dump(mode="json", exclude_none=True, exclude={"parsed_arguments"}))
        for item, _ in calls:
            history.append({"type": "function_call_output", "call_id": item.call_id, "output": RESULT})
        counts.append(len(calls))
    return counts


async def messages_session(client: anthropic.AsyncAnthropic, model: str, seed: int) -> list[int]:
    """As Claude Code asks: marks where the cache is to begin, and leave to clear what is old."""
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
    tools: list[Any] = [{"name": name, "description": "Reads.", "input_schema": PATHS} for name in NAMES]
    tools[-1] |= mark
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": TASK}]}]
    counts = []
    for turn in range(ROUNDS):
        last = history[-1]["content"][-1]
        asked: dict[str, Any] = {
            "model": model, "max_tokens": TWO_CALLS["max_tokens"], "tools": tools, "tool_choice": {"type": "any"},
            "system": [{"type": "text", "text": "Be brief.", **mark}],
            "messages": [*history[:-1], {"role": "user", "content": [*history[-1]["content"][:-1], last | mark]}],
            "metadata": {"user_id": "me"},
            "extra_body": {
                "context_management": {"edits": edits},
                "seed": seed + turn,
                "min_tokens": TWO_CALLS["min_tokens"],
            },
        }  # fmt: skip
        message = await answer(client.messages, "get_final_message", turn, asked)
        blocks = [block for block in message.content if block.type == "tool_use"]
        if message.stop_reason == "max_tokens":
            blocks.pop()  # it may be cut off
        for block in blocks:
            check_call(block.name, block.input)
        told = [block.model_dump(mode="json", exclude_none=True, exclude={"caller"}) for block in blocks]
        history.append({"role": "assistant", "content": told or [{"type": "text", "text": "Hm."}]})
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": RESULT} for block in blocks]
        history.append({"role": "user", "content": results or [{"type": "text", "text": "Go on."}]})
        counts.append(len(blocks))
    return counts


def whole_calls(calls: list[tuple[Any, str]]) -> list[tuple[Any, Any]]:
    """With their arguments read; the last one may be cut off in a stream."""
    read = []
    for call, text in calls:
        try:
            read.append((call, json.loads(text)))
        except json.JSONDecodeError:
            assert call is calls[-1][0]
    return read


@pytest.mark.timeout(300)
async def test_coding_agents_read_call_and_leave_in_the_middle_over_every_protocol(service: Service) -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{service.http_url}/v1", api_key="none", timeout=120) as client,
        anthropic.AsyncAnthropic(base_url=service.http_url, api_key="none", timeout=120) as other,
    ):
        model = (await client.models.list()).data[0].id
        found = await asyncio.gather(
            chat_session(client, model, 1), responses_session(client, model, 20), messages_session(other, model, 40)
        )
    for counts in found:
        assert len(counts) == ROUNDS
        assert max(counts) >= 2, "calls beside each other"
        assert min(counts) >= 1
    async with AsyncClient(service.grpc_address) as ours, asyncio.timeout(30):
        while (await ours.status()).queue.running:
            await asyncio.sleep(0.01)


async def test_openai_parses_an_answer_into_a_class(service: Service) -> None:
    async with openai.AsyncOpenAI(base_url=f"{service.http_url}/v1", api_key="none", timeout=120) as client:
        model = (await client.models.list()).data[0].id
        whole = await client.chat.completions.parse(
            model=model,
            messages=[{"role": "user", "content": "Which line?"}],
            response_format=Edit,
            seed=3,
            max_tokens=600,
        )
        assert isinstance(whole.choices[0].message.parsed, Edit)
