"""The dialects of embeddings, scores and ranks, before a generator that says what each input is to give."""

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest

from baton_proto.pooling import EMBED, GENERATE, SCORE
from baton_proto.token_counts import TokenCounts
from router.api.http.server import serve_http
from router.api.serving.app import create_app
from router.requests.fan_out import MAX_BESIDE
from router.requests.frontend import Limits
from router.requests.request import Finished, GenerateRequest, Piece
from runtime.security.bearer_keys import BearerKeys
from runtime.security.callers import key_name, parse_callers
from runtime.security.secret import Secret
from tests.router.scripted_generator import MODEL, ScriptedGenerator, make_frontend, tiny_tokenizer


class PoolingGenerator(ScriptedGenerator):
    """An embedding has the prompt's length and its first token; a score is the length of the document."""

    tasks = frozenset((EMBED, SCORE))
    beside = most_beside = 0

    def limits(self) -> Limits:
        return msgspec.structs.replace(super().limits(), tasks=self.tasks, dimension=2 * (EMBED in self.tasks))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Piece | Finished, None]:
        self.requests.append(request)
        self.beside += 1
        self.most_beside = max(self.most_beside, self.beside)
        await asyncio.sleep(0)
        assert request.pooling is not None
        texts = request.pooling.texts
        values = [len(texts[1])] if texts else [len(request.prompt), int(request.prompt[0])]
        yield Piece(0, [], "", "stop", pooled=np.array(values, "<f4").tobytes())
        self.beside -= 1
        yield Finished(TokenCounts(len(request.prompt)))


@pytest.fixture
def generator(tiny_model: Path) -> PoolingGenerator:
    return PoolingGenerator(tiny_tokenizer(tiny_model))


@asynccontextmanager
async def asked(generator: PoolingGenerator, **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(replace(make_frontend(generator), **changes), lambda: b"")
    async with (
        await serve_http(app, "127.0.0.1", 0) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client,
    ):
        yield client


@pytest.fixture
async def http(generator: PoolingGenerator) -> AsyncIterator[httpx.AsyncClient]:
    async with asked(generator) as client:
        yield client


async def test_embeddings_come_in_the_order_of_their_inputs(
    http: httpx.AsyncClient, generator: PoolingGenerator
) -> None:
    inputs = [[7] * number for number in range(1, 201)]
    answer = (await http.post("/v1/embeddings", json={"input": inputs, "dimensions": 2, "priority": 0})).json()
    assert [one["embedding"] for one in answer["data"]] == [[float(number), 7.0] for number in range(1, 201)]
    assert [one["index"] for one in answer["data"]] == list(range(200))
    assert answer["usage"] == {"prompt_tokens": 20100, "total_tokens": 20100}
    assert 1 < generator.most_beside <= MAX_BESIDE, "a call does not fill the queue"
    (pooling,) = {(one.pooling.task, one.pooling.fields) for one in generator.requests if one.pooling}
    assert pooling == (EMBED, b'{"dimensions":2}')
    assert {one.sampling[0].max_tokens for one in generator.requests} == {0}


async def test_openais_client_reads_texts_and_base64(http: httpx.AsyncClient) -> None:
    async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none") as client:
        answer = await client.embeddings.create(model=MODEL, input=["hello", "hello world"])
    assert [len(one.embedding) for one in answer.data] == [2, 2]
    plain = await http.post("/v1/embeddings", json={"input": "hello", "encoding_format": "base64"})
    coded = plain.json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(coded), "<f4").tolist() == answer.data[0].embedding


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_ranked(http: httpx.AsyncClient, generator: PoolingGenerator, path: str) -> None:
    body = {"query": "q", "documents": ["a", "abc", "ab"], "top_n": 2, "max_tokens_per_doc": 5}
    answer = (await http.post(path, json=body)).json()
    assert [(one["index"], one["relevance_score"]) for one in answer["results"]] == [(1, 3.0), (2, 2.0)]
    assert answer["results"][0]["document"] == {"text": "abc"}
    assert {one.pooling.fields for one in generator.requests if one.pooling} == {b'{"max_tokens_per_doc":5}'}
    bare = (await http.post(path, json=body | {"return_documents": False})).json()
    assert "document" not in bare["results"][0]


async def test_pairs_are_scored_one_to_many_and_one_by_one(http: httpx.AsyncClient) -> None:
    for path, first in (("/score", "q"), ("/v1/score", ["p", "q"])):
        answer = (await http.post(path, json={"text_1": first, "text_2": ["a", "abc"]})).json()
        assert [one["score"] for one in answer["data"]] == [1.0, 3.0]
    answer = await http.post("/score", json={"text_1": ["p", "q"], "text_2": ["a", "b", "c"]})
    assert "text_1: has 2 texts, text_2 3" in answer.json()["error"]["message"]


async def test_where_nobody_scores_embeddings_of_the_texts_do(generator: PoolingGenerator) -> None:
    generator.tasks = frozenset((EMBED,))
    documents = ["a", "hello world " * 90, "b " * 300]
    async with asked(generator) as http:
        texts = ["hello", *documents]
        embedded = (await http.post("/v1/embeddings", json={"input": texts})).json()
        vectors = [np.array(one["embedding"]) / np.linalg.norm(one["embedding"]) for one in embedded["data"]]
        scores = [vectors[0] @ each for each in vectors[1:]]
        assert max(scores) - min(scores) > 1e-3, "an order by noise shows nothing"
        for first in ("hello", ["hello", "hello", "hello"], ["a", "hello", "hello"]):
            answer = (await http.post("/score", json={"text_1": first, "text_2": documents})).json()
            expected = [1.0, *scores[1:]] if first[0] == "a" else scores
            np.testing.assert_allclose([one["score"] for one in answer["data"]], expected, rtol=1e-6)
        ranked = (await http.post("/rerank", json={"query": "hello", "documents": documents})).json()
        assert [one["index"] for one in ranked["results"]] == sorted(range(3), key=lambda index: -scores[index])
        assert ranked["results"][0]["document"]["text"] == documents[ranked["results"][0]["index"]]
        assert ranked["usage"] == embedded["usage"], "a query is computed once"
        cut = {"text_1": ["hello world", "hello world"], "text_2": ["hello x", "a"], "truncate_prompt_tokens": 1}
        answer = (await http.post("/score", json=cut)).json()
        assert answer["usage"]["prompt_tokens"] == 4
        for body, message in (
            ({"query": "q", "documents": ["a", ""]}, "documents[1]: is empty; at least one token is needed"),
            ({"query": "", "documents": ["a", "b"]}, "query: is empty; at least one token is needed"),
            ({"query": "q", "documents": ["a"], "instruction": "i"}, "instruction: is known to vLLM servers alone"),
            ({"query": "q", "documents": [], "top_n": 1}, "documents: has 0 entries; 1 to 2048 are allowed"),
        ):
            refused = await http.post("/rerank", json=body)
            assert refused.status_code == 400
            assert refused.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": [7] * 4097}, "input: has 4097 tokens; the model takes 4096"),
        ({"input": []}, "input: has 0 entries; 1 to 2048 are allowed"),
        ({"input": ["a"] * 2049}, "input: has 2049 entries; 1 to 2048 are allowed"),
        ({"input": ["a", 5]}, "input: must be a string, token ids, or a list of either, not a mixture"),
        ({"input": ["a", ""]}, "input[1]: is empty; at least one token is needed"),
        ({"input": "a", "dimension": 5}, "dimension: is not known here; the nearest known field is 'dimensions'"),
    ],
)
async def test_what_cannot_be_embedded_is_named(http: httpx.AsyncClient, body: dict[str, Any], message: str) -> None:
    answer = await http.post("/v1/embeddings", json=body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
    assert (await http.post("/v1/embeddings", json={"input": [7] * 4096})).status_code == 200, "all of it is prompt"
    cut = await http.post("/v1/embeddings", json={"input": [[7] * 4097], "truncate_prompt_tokens": -1})
    assert cut.json()["usage"]["prompt_tokens"] == 4096


async def test_a_service_says_what_its_model_does_instead(generator: PoolingGenerator) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    async with asked(generator) as http:
        answer = await http.post("/v1/chat/completions", json=chat)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "model_not_found")
        assert error["message"] == f"model: '{MODEL}' does not generate here; what it does: embed, score"
        (model,) = (await http.get("/v1/models")).json()["data"]
        assert (model["tasks"], model["dimension"]) == ([EMBED, SCORE], 2)
        generator.tasks = frozenset((GENERATE,))
        answer = await http.post("/v1/embeddings", json={"input": "a"})
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == f"model: '{MODEL}' does not embed here; what it does: generate"
        generator.tasks = frozenset()  # nobody is there yet, and the request waits for somebody
        assert (await http.post("/v1/embeddings", json={"input": "a"})).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
    ],
)
async def test_keys_and_their_limits_hold_for_embeddings_scores_and_ranks(
    generator: PoolingGenerator, path: str, body: dict[str, Any]
) -> None:
    lines = "acme tenant=acme max_priority=5\nfew tenant=few requests_per_minute=2"
    app = create_app(make_frontend(generator), lambda: b"", keys=BearerKeys(parse_callers(lines, "test")))
    async with (
        await serve_http(app, "127.0.0.1", 0) as server,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as client,
    ):

        async def post(key: str, **more: Any) -> tuple[int, str]:
            answer = await client.post(path, json=body | more, headers={"authorization": f"Bearer {key}"})
            return answer.status_code, answer.text

        assert (await post("wrong"))[0] == 401
        assert (await post("acme", priority=5))[0] == 200
        status, text = await post("acme", priority=6)
        assert (status, "priority: is 6, must be at most 5" in text) == (400, True)
        assert [(one.tenant, one.priority) for one in generator.requests] == [("acme", 5)] * 2
        accounts = {one.account.key for one in generator.requests if one.account}
        assert accounts == {key_name(Secret("acme"))}
        assert [(await post("few"))[0] for _ in range(3)] == [200, 200, 429], "a call counts once, whatever its inputs"
