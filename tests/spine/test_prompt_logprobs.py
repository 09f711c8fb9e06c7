"""Log-probabilities of prompts through a whole service: shipped prompts and others, cached or not, over both APIs."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch

from baton_proto.generated import inference_pb2 as pb
from router.api.openai.token_names import TokenNames
from router.text.tokenizer import Tokenizer
from runtime.calls.answer import Answer
from tests.service import Service, SharedService, running_service
from tests.spine.busy import killed_while_busy
from tests.spine.oracle import Oracle
from tests.spine.prompts import ask, greedy, random_prompt
from tests.spine.worker_view import until_idle
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

NEAR = 1e-3
SHIP_SOME = {"router": {"placement": {"local_prefill_tokens": 32}}, "engine": {"max_batch_tokens": 64}}
SHIPPED, HERE = 150, 20  # tokens of prompts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(model: Path) -> AsyncIterator[SharedService]:
    async with SharedService(model, 1, 1, SHIP_SOME) as shared:
        yield shared


@pytest.mark.asyncio(loop_scope="module")
async def test_prompts_are_scored(shared: SharedService, oracle: Oracle, model: Path) -> None:
    """One service for all of it."""
    async with shared.using() as service:
        await prompts_are_scored(service, oracle, model)


async def prompts_are_scored(service: Service, oracle: Oracle, model: Path) -> None:
    async with httpx.AsyncClient(base_url=f"{service.http_url}/v1", timeout=60) as http:
        for length in (HERE, SHIPPED):
            await an_echo_with_logprobs_is_what_loglikelihood_tasks_ask(
                http, oracle, random_prompt(length, seed=length)
            )
            await the_whole_prompt_is_computed_though_it_is_cached(
                service, oracle, random_prompt(length, seed=length + 1)
            )
        await a_batch_of_prompts_is_scored_prompt_by_prompt(http, oracle)
        await an_echo_is_the_callers_text(http, Tokenizer(model, VOCAB_SIZE), oracle)
        await a_streamed_echo_adds_up_to_the_whole(http)
        await details_are_as_vllm_writes_them(http, oracle)
        await what_cannot_be_served_is_refused(http)
    await until_idle(service)


def expected(oracle: Oracle, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities after each of its tokens: float32 [len(prompt), vocab]"""
    return oracle.logits(prompt).log_softmax(dim=-1)


async def complete(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await http.post("/completions", json=body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


async def an_echo_with_logprobs_is_what_loglikelihood_tasks_ask(
    http: httpx.AsyncClient, oracle: Oracle, tokens: list[int]
) -> None:
    """lm-evaluation-harness sends context and continuation as one prompt and reads sum and greediness like this."""
    whole = await complete(http, prompt=[tokens], temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True)
    (choice,) = whole["choices"]
    told, context, rows = choice["logprobs"], len(tokens) // 2, expected(oracle, tokens)
    assert {len(values) for values in told.values()} == {len(tokens) + 1}
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    exact = [rows[i - 1, tokens[i]].item() for i in range(context, len(tokens))]
    assert told["token_logprobs"][context:-1] == pytest.approx(exact, abs=NEAR)
    for logprob, top, row in zip(
        told["token_logprobs"][context:-1], told["top_logprobs"][context:-1], rows[context - 1 :], strict=False
    ):
        is_greedy = logprob == max(top.values())
        assert is_greedy == (logprob == pytest.approx(row.max().item(), abs=NEAR))
    assert whole["usage"]["prompt_tokens"] == len(tokens)
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def the_whole_prompt_is_computed_though_it_is_cached(service: Service, oracle: Oracle, tokens: list[int]) -> None:
    plain = await ask(service.client, tokens, 6)
    asking = await ask(service.client, tokens, 6, prompt_logprobs=3)
    assert (len(tokens) > HERE) == bool(asking.served_by[0].prefill_worker)
    assert asking.token_ids == plain.token_ids
    assert asking.usage.cached_tokens == 0
    rows = expected(oracle, tokens)
    assert [one.token_id for one in asking.prompt_logprobs] == tokens[1:]
    for one, row in zip(asking.prompt_logprobs, rows, strict=False):
        assert one.logprob == pytest.approx(row[one.token_id].item(), abs=NEAR)
        assert [top.logprob for top in one.top] == pytest.approx(row.topk(3).values.tolist(), abs=NEAR)
    assert (await ask(service.client, tokens, 6)).usage.cached_tokens > 0


async def a_batch_of_prompts_is_scored_prompt_by_prompt(http: httpx.AsyncClient, oracle: Oracle) -> None:
    prompts = [random_prompt(length, seed=length) for length in (1, 2, 17, 40, 129)]
    whole = await complete(http, prompt=prompts, temperature=0, max_tokens=0, logprobs=0, echo=True)
    assert [choice["index"] for choice in whole["choices"]] == list(range(5))
    for prompt, choice in zip(prompts, whole["choices"], strict=True):
        rows = expected(oracle, prompt)
        exact = [rows[i, token].item() for i, token in enumerate(prompt[1:])]
        assert choice["logprobs"]["token_logprobs"] == [None, *(pytest.approx(one, abs=NEAR) for one in exact)]
        assert choice["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 5, "as vLLM counts what it draws and nobody sees"


async def an_echo_is_the_callers_text(http: httpx.AsyncClient, tokenizer: Tokenizer, oracle: Oracle) -> None:
    text = "The baton, <|im_start|>café 😀 and"
    tokens = tokenizer.encode(text).tolist()
    plain = await complete(http, prompt=text, max_tokens=8, temperature=0)
    output = plain["choices"][0]["text"]
    for prompt in (text, tokens):
        whole = await complete(http, prompt=prompt, max_tokens=8, temperature=0, echo=True, logprobs=2)
        (choice,) = whole["choices"]
        assert choice["text"] == text + output
        told = choice["logprobs"]
        assert told["text_offset"][len(tokens)] == len(text)
        assert told["tokens"][: len(tokens)] == list(map(TokenNames(tokenizer).next, tokens))
        assert sorted(told["text_offset"]) == told["text_offset"]
        best = {tokenizer.token_text(int(i)) for i in expected(oracle, tokens)[0].topk(2).indices}
        assert best <= set(told["top_logprobs"][1])
    assert (await complete(http, prompt=tokens, max_tokens=0, echo=True))["choices"][0] == {
        "index": 0, "text": text, "logprobs": None, "finish_reason": "length",
    }  # fmt: skip
    alone = await complete(http, prompt=tokens, max_tokens=0, echo=True, return_token_ids=True)
    assert (alone["choices"][0]["prompt_token_ids"], alone["choices"][0]["token_ids"]) == (tokens, [])


async def a_streamed_echo_adds_up_to_the_whole(http: httpx.AsyncClient) -> None:
    prompt = random_prompt(300, seed=7)
    body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "echo": True, "logprobs": 20, "return_token_ids": True}
    whole = (await complete(http, **body))["choices"][0]
    assert (whole["prompt_token_ids"], len(whole["token_ids"])) == (prompt, 5)
    async with http.stream("POST", "/completions", json=body | {"stream": True, "n": 2}) as stream:
        chunks = [line.removeprefix("data: ") async for line in stream.aiter_lines() if line]
    assert chunks.pop() == "[DONE]"
    assert len(chunks) > 4
    for index in (0, 1):
        text, prompts, output = "", [], []
        told: dict[str, list[Any]] = {name: [] for name in whole["logprobs"]}
        for choice in (json.loads(chunk)["choices"][0] for chunk in chunks):
            if choice["index"] != index:
                continue
            text += choice["text"]
            prompts.append(choice.get("prompt_token_ids"))
            output += choice.get("token_ids", [])
            for name in told:
                told[name] += choice["logprobs"][name] if choice["logprobs"] else []
        assert (text, told["text_offset"]) == (whole["text"], whole["logprobs"]["text_offset"])
        assert (prompts, output) == ([prompt, *[None] * (len(prompts) - 1)], whole["token_ids"])
        assert told["tokens"] == whole["logprobs"]["tokens"]
        assert told["token_logprobs"][1:] == pytest.approx(whole["logprobs"]["token_logprobs"][1:], abs=NEAR)


async def details_are_as_vllm_writes_them(http: httpx.AsyncClient, oracle: Oracle) -> None:
    prompt = random_prompt(50, seed=8)
    rows = expected(oracle, prompt)
    (choice,) = (await complete(http, prompt=prompt, max_tokens=2, prompt_logprobs=2))["choices"]
    assert choice["logprobs"] is None
    assert choice["prompt_logprobs"][0] is None
    for token, row, told in zip(prompt[1:], rows, choice["prompt_logprobs"][1:], strict=False):
        best = row.topk(2).indices.tolist()
        assert set(told) == {str(one) for one in (*best, token)}
        assert told[str(token)]["logprob"] == pytest.approx(row[token].item(), abs=NEAR)
        assert told[str(token)]["rank"] == int((row > row[token]).sum()) + 1
        assert [told[str(one)]["rank"] for one in best] == [1, 2]
    chat = {"messages": [{"role": "user", "content": "Who has the baton?"}], "max_tokens": 3, "prompt_logprobs": 0}
    whole = (await http.post("/chat/completions", json=chat)).json()
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    assert all(len(one) == 1 for one in whole["prompt_logprobs"][1:])


async def what_cannot_be_served_is_refused(http: httpx.AsyncClient) -> None:
    many = [random_prompt(1000, seed=i) for i in range(13)]
    for body, field, problem in [
        ({"prompt": [5] * 4000, "echo": True, "logprobs": 20, "n": 4}, "logprobs", "at most 262144 are answered"),
        ({"prompt": many, "prompt_logprobs": 20}, "prompt_logprobs", "at most 262144 are answered at once"),
        ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
        ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1"),
    ]:
        answer = await http.post("/completions", json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == field
        assert problem in error["message"]


def assert_exact(answer: Answer, prompt: list[int], oracle: Oracle) -> None:
    told, rows = answer.prompt_logprobs, expected(oracle, prompt)
    assert [one.token_id for one in told] == prompt[1:]
    exact = [row[token].item() for row, token in zip(rows, prompt[1:], strict=False)]
    assert [one.logprob for one in told] == pytest.approx(exact, abs=NEAR)


@pytest.mark.asyncio(loop_scope="module")
async def test_choices_share_one_computed_and_shipped_prompt(shared: SharedService, oracle: Oracle) -> None:
    prompt = random_prompt(SHIPPED, seed=50)
    async with shared.using() as service:
        sampling = pb.SamplingOptions(temperature=0.9, seed=3, max_tokens=12, n=4, prompt_logprobs=1, ignore_eos=True)
        request = pb.GenerateRequest(tokens=pb.TokenIds(ids=prompt), sampling=sampling)
        together = await service.client.generate(request, 60)
        assert together.served_by[0].prefill_worker == "prefill-1"
        for choice in together.choices:
            assert_exact(replace(together, choices=[choice]), prompt, oracle)
        for i, choice in enumerate(together.choices):
            sampling = pb.SamplingOptions(temperature=0.9, seed=3 + i, max_tokens=12, ignore_eos=True)
            alone = await service.client.generate(
                pb.GenerateRequest(tokens=pb.TokenIds(ids=prompt), sampling=sampling), 60
            )
            assert choice.token_ids == alone.token_ids
        await until_idle(service)


async def test_a_prefill_worker_killed_in_mid_prompt_costs_no_score(model: Path, oracle: Oracle) -> None:
    async with running_service(model, 1, 1, SHIP_SOME, engine={"max_batch_tokens": 8}) as service:

        async def answer_of(number: int) -> Answer:
            return await ask(service.client, random_prompt(2000, seed=900 + number), 6, prompt_logprobs=1)

        _, answers = await killed_while_busy(service, ["prefill-1"], answer_of, callers=2, prompt_tokens=1400)
        assert any(answer.served_by[0].attempts > 1 for answer in answers.values())
        for number, answer in answers.items():
            assert_exact(answer, random_prompt(2000, seed=900 + number), oracle)
        await until_idle(service)


async def test_a_decode_worker_killed_in_mid_stream_costs_and_doubles_no_score(model: Path, oracle: Oracle) -> None:
    prompts = [random_prompt(length, seed=length) for length in (HERE, SHIPPED, 2, SHIPPED + 1)]
    async with running_service(model, 1, 2, SHIP_SOME) as service:
        begun = asyncio.Event()

        async def answer_of(number: int) -> Answer:
            request = greedy(prompts[number % 4], 1600, ignore_eos=True, prompt_logprobs=1)
            return await service.client.generate(request, 60, lambda piece: begun.set())

        _, answers = await killed_while_busy(service, ["decode-1", "decode-2"], answer_of, 4, begun=begun)
        assert any(answer.served_by[0].attempts > 1 for answer in answers.values())
        for number, answer in answers.items():
            prompt = prompts[number % 4]
            assert_exact(answer, prompt, oracle)
            assert answer.token_ids == oracle.greedy(prompt, 1600, ignore_eos=True, guess=answer.token_ids)
