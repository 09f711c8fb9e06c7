"""Agents of several frameworks run a tool and give a typed answer, each with models of five families through a service.

The models are scripted: what they say is right, so that whatever is wrong is ours. `make test-frameworks` installs the
frameworks.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import pydantic
import pytest
import pytest_asyncio

from tests.scripted_families import FAMILIES, QWEN3
from tests.scripted_model import AFTER_TOOL, write_scripted_model
from tests.service import Service, running_service

WANTED = "run make test-frameworks"
agents = pytest.importorskip("agents", reason=WANTED)
instructor = pytest.importorskip("instructor", reason=WANTED)
langchain_openai = pytest.importorskip("langchain_openai", reason=WANTED)
pydantic_ai = pytest.importorskip("pydantic_ai", reason=WANTED)
claude_models = pytest.importorskip("pydantic_ai.models.anthropic", reason=WANTED)
openai_models = pytest.importorskip("pydantic_ai.models.openai", reason=WANTED)
claude_provider = pytest.importorskip("pydantic_ai.providers.anthropic", reason=WANTED)
openai_provider = pytest.importorskip("pydantic_ai.providers.openai", reason=WANTED)
pytestmark = pytest.mark.asyncio(loop_scope="module")
CODEX = Path(sys.prefix) / "node_modules/.bin/codex"
MODEL = "scripted"
QUESTION = "How warm is it in Bern?"
WEATHER = '{"city": "Bern", "degrees": 21}'
THOUGHT = {
    "qwen3": "<think>\nLet me see.\n</think>\n\n",
    "deepseek": "Let me see.\n</think>\n\n",
    "harmony": "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant",
}
CALL = {
    "qwen3": '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
    "llama3": '{"name": "NAME", "parameters": ARGUMENTS}',
    "mistral": "[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "harmony": "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>",
}
FINAL = {"harmony": "<|channel|>final<|message|>"}
IS_LAST = f"tools and 'Weather' in (tools | tojson) and ({AFTER_TOOL} or tools | length == 1)"


class Weather(pydantic.BaseModel):
    """What is asked for as a class."""

    city: str
    degrees: int


class Find(pydantic.BaseModel):
    """Finds how warm it is."""

    city: str


BERN = Weather(city="Bern", degrees=21)


def call(family: str, name: str, arguments: str) -> str:
    return CALL[family].replace("NAME", name).replace("ARGUMENTS", arguments)


def scripts(family: str) -> dict[str, str]:
    """Calls Find, then answers; calls Weather instead of answering where there is such a tool. R1 thinks no more behind
    a tool's result, because its prompt does not open the thought there."""
    thought = THOUGHT.get(family, "")
    again = "" if family == "deepseek" else thought
    answer = FINAL.get(family, "") + WEATHER
    return {
        f"{IS_LAST} and {AFTER_TOOL}": again + call(family, "Weather", WEATHER),
        IS_LAST: thought + call(family, "Weather", WEATHER),
        AFTER_TOOL: again + answer,
        "not tools": thought + answer,
        "true": thought + call(family, "Find", '{"city": "Bern"}'),
    }


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=FAMILIES)
async def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    family: str = request.param
    model = write_scripted_model(
        tmp_path_factory.mktemp(family) / family, scripts(family), FAMILIES[family], max_position_embeddings=2048
    )
    async with running_service(model, 1, 1, served_model_name=MODEL) as service:
        yield service


@pytest_asyncio.fixture(loop_scope="module")
async def client(service: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{service.http_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def claude(service: Service) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=service.http_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "Find"}}])
async def test_the_client_of_openai_parses_calls_and_then_the_answer(client: openai.AsyncOpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "response_format": Weather, "max_tokens": 300}
    asked["tools"] = [openai.pydantic_function_tool(Find)]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    first = await client.chat.completions.parse(**asked, messages=messages, tool_choice=choice)
    said = first.choices[0].message
    (called,) = said.tool_calls or ()
    assert called.function.parsed_arguments == Find(city="Bern")
    assert first.choices[0].finish_reason == "tool_calls"
    async with client.chat.completions.stream(**asked, messages=messages, tool_choice=choice) as stream:
        streamed = (await stream.get_final_completion()).choices[0].message
    assert [each.function.arguments for each in streamed.tool_calls or ()] == [called.function.arguments]
    messages += [said, {"role": "tool", "tool_call_id": called.id, "content": "21"}]
    second = (await client.chat.completions.parse(**asked, messages=messages)).choices[0].message
    assert second.parsed == BERN
    assert not second.tool_calls


async def test_the_client_of_openai_parses_responses(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "text_format": Weather, "max_output_tokens": 300}
    asked["tools"] = [openai.pydantic_function_tool(Find)["function"] | {"type": "function"}]
    first = await client.responses.parse(**asked, input=QUESTION)
    (called,) = [item for item in first.output if item.type == "function_call"]
    assert json.loads(called.arguments) == {"city": "Bern"}
    output: Any = [{"type": "function_call_output", "call_id": called.call_id, "output": "21"}]
    second = await client.responses.parse(**asked, input=output, previous_response_id=first.id)
    assert second.output_parsed == BERN


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "Find"}])
async def test_the_client_of_anthropic_gets_calls_and_then_the_answer(
    claude: anthropic.AsyncAnthropic, choice: Any
) -> None:
    tool: Any = {"name": "Find", "description": "Finds.", "input_schema": Find.model_json_schema(), "strict": True}
    form: Any = {"format": {"type": "json_schema", "schema": anthropic.transform_schema(Weather)}}
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "tools": [tool], "output_config": form}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    async with claude.messages.stream(**asked, messages=messages, tool_choice=choice) as stream:
        first = await stream.get_final_message()
    (called,) = [block for block in first.content if block.type == "tool_use"]
    assert (called.name, called.input, first.stop_reason) == ("Find", {"city": "Bern"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": called.id, "content": "21"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = await claude.messages.create(**asked, messages=messages)
    assert Weather.model_validate_json(second.content[-1].text) == BERN  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
async def test_an_agent_of_openai_runs_its_tool(client: openai.AsyncOpenAI, kind: str) -> None:
    found: list[str] = []

    async def find(city: str) -> str:
        found.append(city)
        return "21"

    agents.set_tracing_disabled(True)
    agent = agents.Agent(
        name="weather",
        instructions="Say how warm it is.",
        tools=[agents.function_tool(find, name_override="Find")],
        model=getattr(agents, kind)(model=MODEL, openai_client=client),
        output_type=Weather,
    )
    assert (await agents.Runner.run(agent, QUESTION)).final_output == BERN
    streamed = agents.Runner.run_streamed(agent, QUESTION)
    async for _ in streamed.stream_events():
        pass
    assert streamed.final_output == BERN
    assert found == ["Bern", "Bern"]


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
@pytest.mark.parametrize("form", ["native", "tool"])
async def test_an_agent_of_pydantic_runs_its_tool(
    client: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, protocol: str, form: str
) -> None:
    provider = openai_provider.OpenAIProvider(openai_client=client)
    anthropics = claude_provider.AnthropicProvider(anthropic_client=claude)
    model = {
        "chat": lambda: openai_models.OpenAIChatModel(MODEL, provider=provider),
        "responses": lambda: openai_models.OpenAIResponsesModel(MODEL, provider=provider),
        "messages": lambda: claude_models.AnthropicModel(
            MODEL, provider=anthropics, profile={"supports_json_schema_output": True}
        ),
    }[protocol]()
    native, tool = pydantic_ai.NativeOutput(Weather), pydantic_ai.ToolOutput(Weather, name="Weather")
    agent = pydantic_ai.Agent(model, output_type=native if form == "native" else tool)
    found: list[str] = []

    @agent.tool_plain(name="Find")
    def find(city: str) -> str:
        """Finds how warm it is."""
        found.append(city)
        return "21"

    assert (await agent.run(QUESTION)).output == BERN
    assert found == ["Bern"]


async def test_langchain_binds_tools_together_with_a_class(client: openai.AsyncOpenAI) -> None:
    model = langchain_openai.ChatOpenAI(
        base_url=str(client.base_url), api_key="none", model=MODEL, root_async_client=client,
        async_client=client.chat.completions,
    )  # fmt: skip
    bound = model.bind_tools([Find], strict=True, response_format=Weather)
    first = await bound.ainvoke(QUESTION)
    (called,) = first.tool_calls
    assert (called["name"], called["args"]) == ("Find", {"city": "Bern"})
    told = {"role": "tool", "tool_call_id": called["id"], "content": "21"}
    second = await bound.ainvoke([("user", QUESTION), first, told])
    assert second.additional_kwargs["parsed"] == BERN
    for method in ("json_schema", "function_calling"):
        assert await model.with_structured_output(Weather, method=method).ainvoke(QUESTION) == BERN


async def test_instructor_asks_for_a_class_as_a_tool_and_as_a_format(
    client: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "response_model": Weather, "max_retries": 0, "max_tokens": 300}
    messages = [{"role": "user", "content": QUESTION}]
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        instructed = instructor.from_openai(client, mode=mode)
        told = await instructed.chat.completions.create(**asked, messages=messages)
        assert dict(told) == dict(BERN)  # its class is a subclass
    instructed = instructor.from_anthropic(claude, mode=instructor.Mode.TOOLS)
    assert dict(await instructed.messages.create(**asked, messages=messages)) == dict(BERN)


@pytest.mark.skipif(not CODEX.exists(), reason=f"{WANTED}, where npm is installed")
async def test_codex_runs_a_command_and_ends(tmp_path: Path) -> None:
    """Its prompts have 40,000 characters, of which this template shows few."""
    family = replace(
        QWEN3,
        template="{{ tools | length }}{% for message in messages %}{{ message.role }}"
        "{{ (message.content or '')[-200:] }}{% endfor %}<|im_start|>assistant\n",
    )
    run = call("qwen3", "exec_command", '{"cmd": "printf hello > greeting.txt"}')
    say = {AFTER_TOOL: THOUGHT["qwen3"] + "It is written.", "true": THOUGHT["qwen3"] + run}
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    async with running_service(write_scripted_model(tmp_path / "model", say, family), 1, 1) as service:
        provider = f'{{name="Baton", base_url="{service.http_url}/v1", wire_api="responses"}}'
        command = ["exec", "--json", "--skip-git-repo-check", "-s", "danger-full-access", "-m", "model"]
        codex = await asyncio.create_subprocess_exec(
            *(CODEX, *command, "-c", "model_provider=baton", "-c", f"model_providers.baton={provider}", "Greet me."),
            cwd=work, env=os.environ | {"CODEX_HOME": str(home)},
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        printed, _ = await codex.communicate()
    assert codex.returncode == 0, printed.decode()
    assert (work / "greeting.txt").read_text() == "hello"
    assert '"It is written."' in printed.decode()
