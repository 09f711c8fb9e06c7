"""What frameworks make of the API, through a whole service: LiteLLM and lm-evaluation-harness.

They are heavy: `make test-frameworks` installs them.
"""

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import yaml

from router.text.tokenizer import Tokenizer
from tests.service import Service
from tests.spine.oracle import Oracle
from tests.spine.toolbox import PATHS, TOOLS, agent_service
from tests.tiny_model import VOCAB_SIZE

WANTED = "run make test-frameworks"
if not all(map(importlib.util.find_spec, ("litellm", "lm_eval"))):
    pytest.skip(WANTED, allow_module_level=True)
pytestmark = pytest.mark.asyncio(loop_scope="module")
QUESTIONS = [
    {"question": "The baton is passed by", "choices": ["the first runner", "a shop", "two"], "answer": 0},
    {"question": "Paris is the capital of", "choices": ["numbers", "France"], "answer": 1},
    {
        "question": "In the morning the streets are",
        "choices": ["empty", "closed and empty", "42", "digits"],
        "answer": 0,
    },
]
TASK = {
    "task": "relay",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OPENAI_API_KEY": "none",
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    async with agent_service(tmp_path_factory.mktemp("frameworks")) as service:
        yield service


async def test_litellm_streams_calls_tools_and_asks_for_a_class(service: Service) -> None:
    """In a program of its own: it sets up logging and clients for the whole process, and warns."""
    script = """
import asyncio, json, sys
import litellm

async def main(url, model, tools, schema):
    asked = dict(model=f"hosted_vllm/{model}", api_base=url, api_key="none", seed=1, max_tokens=400)
    asked["messages"] = [{"role": "user", "content": "Which line?"}]
    chunks = [chunk async for chunk in await litellm.acompletion(**asked, stream=True)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    whole = await litellm.acompletion(**asked)
    assert text == whole.choices[0].message.content, (text, whole)
    called = await litellm.acompletion(**asked, tools=tools, tool_choice="required", parallel_tool_calls=False)
    told = called.choices[0].message
    streamed = [chunk async for chunk in await litellm.acompletion(
        **asked, tools=tools, tool_choice="required", parallel_tool_calls=False, stream=True)]
    rebuilt = litellm.stream_chunk_builder(streamed).choices[0].message
    calls = [call.function.arguments for call in told.tool_calls]
    assert calls == [call.function.arguments for call in rebuilt.tool_calls]
    again = dict(asked, messages=[*asked["messages"], told.model_dump(), {
        "role": "tool", "tool_call_id": told.tool_calls[0].id, "content": "here"}])
    assert (await litellm.acompletion(**again, tools=tools)).choices
    form = {"type": "json_schema", "json_schema": {"name": "edit", "schema": schema, "strict": True}}
    edit = await litellm.acompletion(**asked, response_format=form)
    print(json.dumps({"calls": calls, "edit": edit.choices[0].message.content}))

asyncio.run(main(*sys.argv[1:3], *map(json.loads, sys.argv[3:])))
"""
    asked = f"{service.http_url}/v1", await served_model(service), json.dumps(TOOLS[:2]), json.dumps(PATHS)
    printed = await run("-c", script, *asked, LITELLM_LOCAL_MODEL_COST_MAP="True")
    told = json.loads(printed.splitlines()[-1])
    (call,) = map(json.loads, told["calls"])
    for found in (call, json.loads(told["edit"])):
        assert found["path"] in ("a.py", "b.py")
        assert 0 <= found["line"] <= 99


async def test_the_harness_finds_the_log_likelihoods_that_transformers_has(service: Service, tmp_path: Path) -> None:
    """A task of multiple choice: each choice is scored by one completion with echo and logprobs."""
    model = Path(service.config.model)
    (tmp_path / "questions.json").write_text("\n".join(map(json.dumps, QUESTIONS)))
    (tmp_path / "relay.yaml").write_text(
        yaml.safe_dump(TASK | {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.json")}}})
    )
    asked = {
        "model": (await served_model(service)),
        "base_url": f"{service.http_url}/v1/completions",
        "tokenizer": str(model),
        "num_concurrent": 2,
        "max_retries": 1,
    }
    await run(
        *("-m", "lm_eval", "run", "--model", "local-completions", "--tasks", str(tmp_path / "relay.yaml")),
        *("--model_args", ",".join(f"{name}={value}" for name, value in asked.items())),
        *("--output_path", str(tmp_path / "out"), "--log_samples"),
        **OFFLINE, HF_HOME=str(tmp_path / "hub"),
    )  # fmt: skip
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    told = {sample["doc_id"]: sample for sample in map(json.loads, samples.read_text().splitlines())}
    oracle, tokenizer, right = Oracle(model), Tokenizer(model, VOCAB_SIZE), 0
    for index, question in enumerate(QUESTIONS):
        exact = [likelihood(oracle, tokenizer, question["question"], choice) for choice in question["choices"]]
        assert [float(one[0][0]) for one in told[index]["resps"]] == pytest.approx(exact, abs=0.02)
        right += exact.index(max(exact)) == question["answer"]
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["relay"]["acc,none"] == pytest.approx(right / len(QUESTIONS))


def likelihood(oracle: Oracle, tokenizer: Tokenizer, context: str, choice: str) -> float:
    """Of a choice after its context and a space, as the harness has it."""
    begin, whole = tokenizer.encode(context).tolist(), tokenizer.encode(f"{context} {choice}").tolist()
    rows = oracle.logits(whole).log_softmax(dim=-1)
    return sum(rows[at - 1, whole[at]].item() for at in range(len(begin), len(whole)))


async def served_model(service: Service) -> str:
    async with httpx.AsyncClient(timeout=60) as http:
        model: str = (await http.get(f"{service.http_url}/v1/models")).json()["data"][0]["id"]
    return model


async def run(*arguments: str, **environment: str) -> str:
    """Python with these arguments; returns what it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, env=os.environ | environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    printed, _ = await process.communicate()
    assert process.returncode == 0, printed.decode()
    return printed.decode()
