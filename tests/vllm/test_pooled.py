"""Embeddings and scores by vLLM servers: two that embed, one of which is killed in the middle of a call."""

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import load_file, save_file

from tests.service import Service, running_service
from tests.tiny_model import write_tiny_model
from tests.vllm.environment import LIMIT_S, PATIENCE_S, START_S
from tests.vllm.server import BLOCK, MODEL, VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(LIMIT_S)]

DIMENSION = 64
NOISE = 1e-5  # of scores, which other texts in a batch change
EMBEDS = ("--runner", "pooling", "--convert", "embed", "--hf-overrides", json.dumps({"is_matryoshka": True}))
SCORES = ("--runner", "pooling", "--convert", "classify")


def write_scorer(folder: Path) -> Path:
    write_tiny_model(folder, architecture="qwen3", head_dim=32, num_labels=1, id2label={"0": "L"}, label2id={"L": 0})
    weights = load_file(folder / "model.safetensors")
    head = np.random.default_rng(5).normal(size=(1, DIMENSION), scale=0.1).astype(weights["lm_head.weight"].dtype)
    save_file(weights | {"score.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def worker_with_vllm(python: Path, **arguments: Any) -> dict[str, Any]:
    return {
        "workers": {"engine": "vllm", "python": str(python), "ready_timeout_s": START_S},
        "engine": {"block_size": BLOCK, "kv_memory": "64MiB", "max_model_len": 512},
        "vllm": {"runner": "pooling", **arguments},
    }


def told(server: VllmServer, name: str) -> dict[str, Any]:
    return {"name": name, "address": server.address, "model": MODEL}


@asynccontextmanager
async def serving(model: Path, *servers: VllmServer) -> AsyncIterator[Service]:
    async with AsyncExitStack() as stack:
        for server in servers:
            stack.push_async_callback(server.close)
        await asyncio.gather(*(server.start() for server in servers))
        workers = [told(server, f"gpu-{number}") for number, server in enumerate(servers)]
        # Without `events` and `replay`: a server that only pools needs none.
        yield await stack.enter_async_context(
            running_service(model, 0, 0, external_workers=workers, engine={"block_size": BLOCK})
        )


async def test_two_servers_embed_and_one_is_killed_in_the_middle(vllm_python: Path, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "embedder", architecture="qwen3", head_dim=32)
    one, two = (
        VllmServer(vllm_python, tmp_path / f"{number}.log", flags=EMBEDS, num_blocks=64, model=model)
        for number in range(2)
    )
    async with serving(model, one, two) as service, httpx.AsyncClient(timeout=PATIENCE_S) as http:
        client = openai.AsyncOpenAI(
            base_url=f"{service.http_url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0
        )
        await answers_are_the_servers_own(client, one)
        await all_forms_of_input_and_answer_are_taken(service, http)
        await scores_and_ranks_are_the_servers_own(service, http, one)
        await what_is_served_is_shown_and_chats_are_404(service, http)
        await no_input_is_lost_with_a_server(client, service, one, two)
        await client.close()


async def test_a_server_that_only_scores(vllm_python: Path, tmp_path: Path) -> None:
    model = write_scorer(tmp_path / "scorer")
    server = VllmServer(vllm_python, tmp_path / "log", flags=SCORES, num_blocks=64, model=model)
    async with serving(model, server) as service, httpx.AsyncClient(timeout=PATIENCE_S) as http:
        await scores_and_ranks_are_the_servers_own(service, http, server)
        answer = await http.post(f"{service.http_url}/v1/embeddings", json={"input": "a"})
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].endswith("does not embed here; what it does: score")


async def answers_are_the_servers_own(client: openai.AsyncOpenAI, server: VllmServer) -> None:
    texts = ["hello world", "another text", "x"]
    theirs = await server.client.post("/v1/embeddings", json={"input": texts, "model": MODEL})
    ours = await client.embeddings.create(model="embedder", input=texts)
    assert [one.index for one in ours.data] == [0, 1, 2]
    for one, other in zip(ours.data, theirs.json()["data"], strict=True):
        np.testing.assert_allclose(one.embedding, other["embedding"], atol=1e-5)
    assert ours.usage.prompt_tokens == theirs.json()["usage"]["prompt_tokens"]


async def all_forms_of_input_and_answer_are_taken(service: Service, http: httpx.AsyncClient) -> None:
    async def embeddings(**body: Any) -> list[Any]:
        answer = await http.post(f"{service.http_url}/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        return [one["embedding"] for one in answer.json()["data"]]

    (alone,) = await embeddings(input=[5, 6, 7])
    first, second = await embeddings(input=[[5, 6, 7], [8]])
    np.testing.assert_allclose(first, alone, atol=1e-5)
    assert len(second) == DIMENSION
    (coded,) = await embeddings(input=[5, 6, 7], encoding_format="base64")
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(coded), "<f4"), alone, atol=1e-5)
    (short,) = await embeddings(input=[5, 6, 7], dimensions=16)
    assert len(short) == 16
    (longest,) = await embeddings(input=[5] * 512)  # nothing is generated behind it
    assert len(longest) == DIMENSION
    many = await embeddings(input=[[number] for number in range(3, 203)])
    assert len(many) == 200
    assert {worker.worker_id for worker in (await service.client.status()).workers if worker.prompt_tokens} == {
        "gpu-0",
        "gpu-1",
    }
    for body, reason in (
        ({"input": [5] * 513}, "has 513 tokens; the largest worker takes 512"),
        ({"input": [5], "dimensions": 3000}, "only supports dimensions in range"),
        ({"input": []}, "1 to 2048 are allowed"),
    ):
        answer = await http.post(f"{service.http_url}/v1/embeddings", json=body)
        assert (answer.status_code, reason in answer.text) == (400, True), answer.text


async def scores_and_ranks_are_the_servers_own(
    service: Service, http: httpx.AsyncClient, server: VllmServer, *, embedded: bool = False
) -> None:
    """Tokens are those of the pairs, each a request of its own: vLLM counts a query once where the model embeds, as
    workers do whose embeddings are compared (`embedded`)."""
    texts = ["c d", "e", "a b"]
    for path in ("/score", "/v1/score"):
        for first in ("a b", ["a b", "e", "c"]):
            pairs = {"text_1": first, "text_2": texts}
            theirs = (await server.client.post(path, json={"model": MODEL, **pairs})).json()
            ours = (await http.post(service.http_url + path, json=pairs)).json()
            assert [one["index"] for one in ours["data"]] == [0, 1, 2]
            scores = [[one["score"] for one in each["data"]] for each in (ours, theirs)]
            np.testing.assert_allclose(*scores, atol=1e-5)
            queries = [first] * len(texts) if isinstance(first, str) else first
            each = [{"text_1": query, "text_2": other} for query, other in zip(queries, texts, strict=True)]
            alone = [(await server.client.post(path, json={"model": MODEL, **pair})).json()["usage"] for pair in each]
            counted = [theirs["usage"]] if embedded else alone
            assert ours["usage"]["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in counted)
    await ranks_are_in_the_servers_order(service, http, server)


async def ranks_are_in_the_servers_order(service: Service, http: httpx.AsyncClient, server: VllmServer) -> None:
    """Documents whose scores by the server itself differ by no more than noise may change places."""
    rng = random.Random(2)
    documents = [" ".join(rng.choices("abcdefghij", k=rng.randrange(1, 20))) for _ in range(30)]
    scored = await server.client.post("/score", json={"model": MODEL, "text_1": "a b c", "text_2": documents})
    scores = [one["score"] for one in scored.json()["data"]]
    assert max(scores) - min(scores) > 100 * NOISE, "an order by noise shows nothing"
    ranked = {"query": "a b c", "documents": documents}
    for path, top_n in (("/rerank", 2), ("/v1/rerank", 7), ("/v2/rerank", 0)):
        body = ranked | ({"top_n": top_n} if top_n else {})
        theirs = (await server.client.post(path, json={"model": MODEL, **body})).json()["results"]
        ours = (await http.post(service.http_url + path, json=body)).json()["results"]
        assert len(ours) == len(theirs) == (top_n or len(documents))
        assert len({one["index"] for one in ours}) == len(ours)
        for one, other in zip(ours, theirs, strict=True):
            assert one["document"]["text"] == documents[one["index"]]
            assert abs(one["relevance_score"] - scores[one["index"]]) < NOISE
            assert one["index"] == other["index"] or abs(scores[one["index"]] - scores[other["index"]]) < NOISE


async def what_is_served_is_shown_and_chats_are_404(service: Service, http: httpx.AsyncClient) -> None:
    (model,) = (await http.get(f"{service.http_url}/v1/models")).json()["data"]
    assert (model["tasks"], model["dimension"], model["max_model_len"]) == (["embed", "score"], DIMENSION, 512)
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    answer = await http.post(f"{service.http_url}/v1/chat/completions", json=chat)
    assert answer.status_code == 404
    assert "does not generate here; what it does: embed, score" in answer.json()["error"]["message"]


async def no_input_is_lost_with_a_server(client: openai.AsyncOpenAI, service: Service, *servers: VllmServer) -> None:
    """A server that has a part of a long call ends in the middle of it."""
    inputs = [[3 + number % 500] * 200 for number in range(600)]
    asked = asyncio.create_task(client.embeddings.create(model="embedder", input=inputs, encoding_format="float"))
    ended = "request ended"
    before = service.log("router-1").count(ended)
    async with asyncio.timeout(PATIENCE_S):
        while service.log("router-1").count(ended) < before + 20:
            assert not asked.done(), "too quick to be interrupted"
            await asyncio.sleep(0.005)
    last = service.log("router-1").rpartition(ended)[2]
    servers["gpu-1" in last].kill()
    answer = await asked
    assert [len(each.embedding) for each in answer.data] == [DIMENSION] * len(inputs)
    replayed = service.log("router-1").count("worker lost in a request")
    assert replayed, "nothing was under way at the server"
    again = await client.embeddings.create(model="embedder", input=inputs[:100], encoding_format="float")
    for each, other in zip(answer.data, again.data, strict=False):
        np.testing.assert_allclose(each.embedding, other.embedding, atol=1e-5)


async def test_a_worker_with_vllm_embeds_as_the_server_does(vllm_python: Path, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "embedder", architecture="qwen3", head_dim=32)
    server = VllmServer(vllm_python, tmp_path / "log", flags=EMBEDS, num_blocks=64, model=model)
    sections = worker_with_vllm(vllm_python, convert="embed", hf_overrides={"is_matryoshka": True})
    try:
        await server.start()
        async with (
            running_service(model, 0, 1, **sections) as service,
            openai.AsyncOpenAI(base_url=f"{service.http_url}/v1", api_key="none", timeout=PATIENCE_S) as client,
            httpx.AsyncClient(timeout=PATIENCE_S) as http,
        ):
            await answers_are_the_servers_own(client, server)
            (short,) = (await client.embeddings.create(model="embedder", input=[5, 6], dimensions=16)).data
            assert len(short.embedding) == 16
            with pytest.raises(openai.BadRequestError, match="only supports dimensions in range"):
                await client.embeddings.create(model="embedder", input=[5, 6], dimensions=3000)
            (served,) = (await http.get(f"{service.http_url}/v1/models")).json()["data"]
            assert (served["tasks"], served["dimension"]) == (["embed"], DIMENSION)
            await scores_and_ranks_are_the_servers_own(service, http, server, embedded=True)
    finally:
        await server.close()


async def test_a_worker_with_vllm_scores_as_the_server_does(vllm_python: Path, tmp_path: Path) -> None:
    model = write_scorer(tmp_path / "scorer")
    server = VllmServer(vllm_python, tmp_path / "log", flags=SCORES, num_blocks=64, model=model)
    sections = worker_with_vllm(vllm_python, convert="classify")
    try:
        await server.start()
        async with (
            running_service(model, 0, 1, **sections) as service,
            httpx.AsyncClient(timeout=PATIENCE_S) as http,
        ):
            await scores_and_ranks_are_the_servers_own(service, http, server)
            pair = {"text_1": "a", "text_2": "b c"}
            for more, reason in (
                ({"truncate_prompt_tokens": 1}, "truncate_prompt_tokens is a vLLM server's"),
                ({"text_2": ["a"] * 3, "max_tokens_per_doc": 5}, "max_tokens_per_doc is a vLLM server's"),
            ):
                answer = await http.post(f"{service.http_url}/v1/score", json=pair | more)
                assert (answer.status_code, reason in answer.text) == (400, True), answer.text
            (served,) = (await http.get(f"{service.http_url}/v1/models")).json()["data"]
            assert served["tasks"] == ["score"]
    finally:
        await server.close()
