"""What agents and their frameworks do, through a whole service, by a model that knows nothing of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import httpx
import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel, Field

from baton import AsyncClient
from tests.service import Service, running_service
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEMPLATE = (
    "{{ (tools or []) | length }}{% for message in messages %}<|im_start|>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>{% endfor %}"
)
PATHS = {
    "type": "object",
    "properties": {"path": {"enum": ["a.py", "b.py"]}, "line": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["path", "line"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": f"tool_{index}", "description": "Reads.", "parameters": PATHS}}
    for index in range(40)
]


class Edit(BaseModel):
    """A line of a file."""

    path: Literal["a.py", "b.py"]
    line: Annotated[int, Field(ge=0, le=99)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    model = write_tiny_model(tmp_path_factory.mktemp("agents") / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    async with running_service(model, 1, 1, {"router": {"tool_parser": "hermes"}}) as service:
        yield service


async def test_a_coding_agent_reads_calls_and_leaves_in_the_middle(service: Service) -> None:
    """Many tools, a history that grows by calls and results, sessions beside each other, a cancelled answer."""
    async with openai.AsyncOpenAI(base_url=f"{service.http_url}/v1", api_key="none", timeout=120) as client:
        model = (await client.models.list()).data[0].id

        async def session(seed: int) -> int:
            history: list[Any] = [{"role": "user", "content": "Mend the test. " * 10}]
            for _ in range(3):
                async with client.chat.completions.stream(
                    model=model, messages=history, tools=TOOLS, tool_choice="required", max_tokens=300, seed=seed
                ) as stream:
                    async for _event in stream:
                        pass
                    whole = await stream.get_final_completion()
                (choice,) = whole.choices
                calls = choice.message.tool_calls or []
                assert calls
                history.append({"role": "assistant", "content": choice.message.content, "tool_calls": []})
                history[-1]["tool_calls"] = [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": call.function.model_dump(include={"name", "arguments"}),
                    }
                    for call in calls
                ]
                for call in calls:
                    assert json.loads(call.function.arguments)["path"] in ("a.py", "b.py")
                    history.append({"role": "tool", "tool_call_id": call.id, "content": "def f(): ...\n" * 5})
            return len(history)

        async def cancelled() -> None:
            stream = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "Go on."}],
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for _ in stream:
                break
            await stream.close()

        lengths = await asyncio.gather(session(1), session(2), cancelled())
        assert min(lengths[:2]) >= 7
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


async def test_langchain_binds_tools_and_asks_for_a_class(service: Service) -> None:
    langchain_openai = pytest.importorskip("langchain_openai", reason="run make test-frameworks")
    async with httpx.AsyncClient(timeout=120) as http:
        model = langchain_openai.ChatOpenAI(
            base_url=f"{service.http_url}/v1",
            api_key="none",
            model="model",
            max_tokens=300,
            seed=1,
            http_async_client=http,
        )
        answer = await model.bind_tools(TOOLS[:2], tool_choice="tool_1", parallel_tool_calls=False).ainvoke("Read.")
        (call,) = answer.tool_calls
        assert call["name"] == "tool_1"
        assert set(call["args"]) == {"path", "line"}
        schema = {"title": "Edit", "description": "A line of a file.", **PATHS}
        for method in ("json_schema", "function_calling"):
            edit = await model.with_structured_output(schema, method=method).ainvoke("Which line?")
            assert edit["path"] in ("a.py", "b.py")
