"""Two models behind one service, with one tokenizer and the same prompts: nobody gets an answer of the other one."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from baton.client.async_client import AsyncClient
from baton_proto.generated import inference_pb2 as pb, open_inference_pb2 as open_inference
from baton_proto.generated.open_inference_pb2_grpc import GRPCInferenceServiceStub as KserveStub
from runtime.calls.answer import Answer
from runtime.errors import BatonError
from tests.service import Service, running_service
from tests.spine.busy import killed_while_busy
from tests.spine.oracle import Oracle
from tests.spine.prompts import greedy, random_prompt
from tests.spine.worker_view import until_idle
from tests.tiny_model import write_tiny_model

NAMES = ("one", "two")
TOKENS = 12
FIRST_SEED = 3  # two models whose likeliest tokens are far apart, over all that is asked here


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("models")
    written = {name: write_tiny_model(folder / name, seed=seed) for seed, name in enumerate(NAMES, FIRST_SEED)}
    return [{"name": name, "model": str(path)} for name, path in written.items()]


@pytest.fixture(scope="module")
def oracles(models: list[dict[str, Any]]) -> dict[str, Oracle]:
    return {model["name"]: Oracle(Path(model["model"])) for model in models}


@pytest.fixture
async def service(models: list[dict[str, Any]]) -> AsyncIterator[Service]:
    models = [models[0] | {"aliases": ["uno"]}, models[1] | {"engine": {"block_size": 32}}]
    async with running_service("smollm2", 1, 1, {"models": models}) as service:
        yield service


async def ask(service: Service, model: str, prompt: list[int], max_tokens: int = TOKENS, **options: Any) -> Answer:
    request = greedy(prompt, max_tokens, **options)
    request.model = model
    return await service.client.generate(request, 120)


async def test_the_same_prompts_get_each_models_own_answers(service: Service, oracles: dict[str, Oracle]) -> None:
    """At once, twice, so that prefixes of both are cached, and with several choices."""
    prompts = [random_prompt(length, seed=length) for length in (5, 64, 200, 700)]
    for round_number in range(2):
        asked = [(name, prompt) for prompt in prompts for name in NAMES]
        answers = await asyncio.gather(*(ask(service, *one, n=1 + round_number) for one in asked))
        for (name, prompt), answer in zip(asked, answers, strict=True):
            right = oracles[name].greedy(prompt, TOKENS)
            assert [choice.token_ids for choice in answer.choices] == [right] * (1 + round_number)
            assert {served.decode_worker for served in answer.served_by} <= {f"decode-{name}-1", f"prefill-{name}-1"}
    assert any(oracles["one"].greedy(prompt, TOKENS) != oracles["two"].greedy(prompt, TOKENS) for prompt in prompts), (
        "the models answer alike, so that nothing is shown"
    )
    long = random_prompt(320, seed=9)
    first = await ask(service, "uno", long)
    assert first.token_ids == oracles["one"].greedy(long, TOKENS)
    assert (await ask(service, "two", long)).usage.cached_tokens == 0, "the prefix is the other model's"
    await _is_scoped(service)


async def _is_scoped(service: Service) -> None:
    """Status, trees and stored events name the model's own workers alone."""
    status = await service.client.status(60)
    assert {(worker.worker_id, worker.model) for worker in status.workers} == {
        (f"{role}-{name}-1", name) for role in ("prefill", "decode") for name in NAMES
    }
    nats = await service.connect_nats("test")
    try:
        for name in NAMES:
            summary, _ = await service.client.tree(pb.TreeRequest(model=name), 60)
            assert summary.blocks
            own = {f"prefill-{name}-1", f"decode-{name}-1"}
            assert {owner.worker_id for owner in summary.workers} <= own
            subjects = await nats.stored_subjects(f"BATON_default--{name}_KV_EVENTS", ">")
            assert {subject.rpartition(".")[2] for subject in subjects} <= own
            assert subjects
        with pytest.raises(grpc.aio.AioRpcError, match="several are served: one, uno, two"):
            await service.client.tree(pb.TreeRequest(), 60)
    finally:
        await nats.close()


async def test_http_names_the_model_and_refuses_other_names(service: Service, oracles: dict[str, Oracle]) -> None:
    prompt = random_prompt(50, seed=3)
    async with httpx.AsyncClient(base_url=service.http_url, timeout=60) as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(model["id"], model.get("aliases")) for model in listed] == [("one", ["uno"]), ("two", None)]
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
        for asked, name in (("one", "one"), ("uno", "one"), ("two", "two")):
            answer = (await http.post("/v1/completions", json=body | {"model": asked})).json()
            assert answer["model"] == name
            assert answer["choices"][0]["token_ids"] == oracles[name].greedy(prompt, TOKENS)
        for path, more in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
            ("/v1/responses", {"input": "a"}),
            ("/tokenize", {"prompt": "a"}),
        ):
            refused = await http.post(path, json=more | {"model": "three"})
            assert (refused.status_code, "served: one, uno, two" in refused.text) == (404, True), path
        assert (await http.post("/tokenize", json={"prompt": "a"})).status_code == 400, "no model is meant by nobody"
        metrics = (await http.get("/metrics")).text
        assert 'baton_router_requests_total{model="two",outcome="completed"} 1.0' in metrics
        assert metrics.count("\nprocess_cpu_seconds_total") == 1
        targets = [target["labels"] for target in (await http.get("/metrics/targets")).json()]
        router, *workers = sorted(targets, key=lambda labels: labels["component"])
        assert router == {"namespace": "default", "component": "router", "process": "router-1"}
        assert {(one["process"], one["model"]) for one in workers} == {
            (f"{role}-{name}-1", name) for role in ("prefill", "decode") for name in NAMES
        }
        assert {one["namespace"] for one in workers} == {"default"}


async def test_messages_and_kserve_are_answered_by_the_model_that_they_name(
    service: Service, oracles: dict[str, Oracle]
) -> None:
    """The same question to each model, streamed and not, while the other one is asked too."""
    told = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}

    async def message(http: httpx.AsyncClient, name: str) -> None:
        tokens = (await http.post("/tokenize", json=told | {"model": name})).json()["tokens"]
        body = {"model": name, "max_tokens": TOKENS, "temperature": 0}
        plain = (await http.post("/v1/completions", json=body | {"prompt": tokens, "return_token_ids": True})).json()
        assert plain["choices"][0]["token_ids"] == oracles[name].greedy(tokens, TOKENS)
        whole = (await http.post("/v1/messages", json=body | told)).json()
        streamed = (await http.post("/v1/messages", json=body | told | {"stream": True})).text
        events = [
            json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line.startswith("data: ")
        ]
        text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
        assert whole["content"][0]["text"] == text == plain["choices"][0]["text"] != ""
        assert (whole["model"], events[0]["message"]["model"]) == (name, name)

    async def inferred(stub: KserveStub, name: str) -> None:
        prompt = random_prompt(70, seed=8)
        asked = open_inference.ModelInferRequest(model_name=name)
        asked.inputs.add(name="input_ids", datatype="INT64", shape=[1, 70]).contents.int64_contents.extend(prompt)
        for wish, value in (("max_tokens", TOKENS), ("temperature", 0)):
            asked.parameters[wish].int64_param = value
        answer = await stub.ModelInfer(asked, timeout=60)
        place = [output.name for output in answer.outputs].index("output_ids")
        assert [*memoryview(answer.raw_output_contents[place]).cast("i")] == oracles[name].greedy(prompt, TOKENS)
        assert answer.model_name == name

    async with httpx.AsyncClient(base_url=service.http_url, timeout=60) as http:
        await asyncio.gather(*(message(http, name) for name in NAMES))
    async with grpc.aio.insecure_channel(service.grpc_address) as channel:
        stub = KserveStub(channel)
        await asyncio.gather(*(inferred(stub, name) for name in NAMES))
        ready = [
            (await stub.ModelReady(open_inference.ModelReadyRequest(name=name))).ready for name in ("uno", "three")
        ]
        assert ready == [True, False]
        with pytest.raises(grpc.aio.AioRpcError, match="served: one, uno, two"):
            await stub.ModelInfer(open_inference.ModelInferRequest(model_name="three"))


async def test_all_workers_of_one_model_sleep_and_wake_while_the_other_answers(
    service: Service, oracles: dict[str, Oracle]
) -> None:
    prompt, key = random_prompt(30, seed=4), service.supervisor.keys.operator[0].reveal()
    async with AsyncClient(service.grpc_address, operator_key=key) as client:
        slept = await client.sleep_all(model="two")
        assert slept.keys() == {"prefill-two-1", "decode-two-1"}
        assert {outcome.state for outcome in slept.values()} == {"sleeping"}
        assert (await ask(service, "one", prompt)).token_ids == oracles["one"].greedy(prompt, TOKENS)
        woken = await client.wake_all(model="two")
        assert {outcome.state for outcome in woken.values()} == {"ready"}
        with pytest.raises(BatonError, match="served: one, uno, two"):
            await client.sleep_all(model="three")
    assert (await ask(service, "two", prompt)).token_ids == oracles["two"].greedy(prompt, TOKENS)


async def test_a_response_of_one_model_is_gone_on_from_by_the_other(service: Service) -> None:
    """With the messages of both: what the other one answers to the whole conversation."""
    async with httpx.AsyncClient(base_url=f"{service.http_url}/v1", timeout=60) as http:
        greedily = {"max_output_tokens": TOKENS, "temperature": 0}
        first = (await http.post("/responses", json=greedily | {"model": "one", "input": "Who?"})).json()
        said = first["output"][-1]["content"][0]["text"]
        asked = greedily | {"model": "two", "input": "Why?", "previous_response_id": first["id"]}
        second = (await http.post("/responses", json=asked)).json()
        told = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": said}]
        whole = {"input": [*told, {"role": "user", "content": "Why?"}]}
        text = second["output"][-1]["content"][0]["text"]
        for model, is_same in (("two", True), ("one", False)):
            answer = (await http.post("/responses", json=greedily | whole | {"model": model})).json()
            assert (answer["output"][-1]["content"][0]["text"] == text) == is_same


async def test_a_killed_worker_costs_no_answer_and_crosses_none(
    models: list[dict[str, Any]], oracles: dict[str, Oracle]
) -> None:
    """While both models answer the same prompts; then the one that has no worker left says so, and the other serves."""
    models = [models[0] | {"decode": 2}, models[1]]
    long = 600

    async with running_service("smollm2", 0, 1, {"models": models, "router": {"no_worker_timeout_s": 1.0}}) as service:

        async def both(number: int) -> list[Answer]:
            prompt = random_prompt(100, seed=number)
            return await asyncio.gather(*(ask(service, name, prompt, long, ignore_eos=True) for name in NAMES))

        async def one_of(number: int) -> Answer:
            first, second = await both(number)
            others[number] = second
            return first

        others: dict[int, Answer] = {}
        decode = [name for name in service.workers("decode") if "-one-" in name]
        lost, answers = await killed_while_busy(service, decode, one_of, 3)
        for number, answer in answers.items():
            prompt = random_prompt(100, seed=number)
            for name, told in (("one", answer), ("two", others[number])):
                assert told.token_ids == oracles[name].greedy(prompt, long, ignore_eos=True, guess=told.token_ids)
                assert f"-{name}-" in told.served_by[0].decode_worker
        await until_idle(service)
        for name in decode:
            if name != lost:
                service.kill(name)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(service, "one", random_prompt(20, seed=1))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        prompt = random_prompt(20, seed=1)
        assert (await ask(service, "two", prompt)).token_ids == oracles["two"].greedy(prompt, TOKENS)
        async with httpx.AsyncClient(base_url=service.http_url, timeout=60) as http:
            assert (await http.get("/ready")).status_code == 200, "one model is served"
