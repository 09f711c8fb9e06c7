"""What langchain makes of embeddings by a vLLM server, through a service. `make test-frameworks` installs it."""

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from tests.tiny_model import write_tiny_model
from tests.vllm.environment import LIMIT_S, PATIENCE_S
from tests.vllm.server import MODEL, VllmServer
from tests.vllm.test_pooled import EMBEDS, ranks_are_in_the_servers_order, serving

langchain_openai = pytest.importorskip("langchain_openai", reason="run make test-frameworks")
vectorstores = pytest.importorskip("langchain_core.vectorstores", reason="run make test-frameworks")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(LIMIT_S)]

WORDS = ["the", "first", "runner", "passes", "a", "baton", "to", "another", "one", "in", "Bern", "and", "rests"]


async def test_langchain_embeds_and_finds_what_the_server_itself_embeds(vllm_python: Path, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "embedder", architecture="qwen3", head_dim=32)
    server = VllmServer(vllm_python, tmp_path / "log", flags=EMBEDS, num_blocks=64, model=model)
    rng = random.Random(1)
    texts = [" ".join(rng.choices(WORDS, k=rng.randrange(1, 30))) + f" {number}" for number in range(40)]
    async with (
        serving(model, server) as service,
        httpx.AsyncClient(timeout=PATIENCE_S) as http,
        AsyncExitStack() as closing,
    ):
        client = closing.enter_context(httpx.Client(timeout=PATIENCE_S))
        theirs = await server.client.post("/v1/embeddings", json={"input": texts, "model": MODEL})
        own = [each["embedding"] for each in theirs.json()["data"]]
        given = {
            "base_url": f"{service.http_url}/v1",
            "api_key": "none",
            "check_embedding_ctx_length": False,  # else it sends tokens of OpenAI's models
            "http_client": client,
            "http_async_client": http,
        }
        embeddings = langchain_openai.OpenAIEmbeddings(model="embedder", chunk_size=16, **given)
        np.testing.assert_allclose(await embeddings.aembed_documents(texts), own, atol=1e-5)
        np.testing.assert_allclose(await asyncio.to_thread(embeddings.embed_query, texts[3]), own[3], atol=1e-5)
        store = vectorstores.InMemoryVectorStore(embeddings)
        await store.aadd_texts(texts)
        likest = np.argsort(-(np.array(own) @ own[7]), kind="stable")[:3]
        found = await store.asimilarity_search(texts[7], k=3)
        assert [each.page_content for each in found] == [texts[index] for index in likest]
        with pytest.raises(openai.NotFoundError, match="embedder"):
            await langchain_openai.OpenAIEmbeddings(model="another", **given).aembed_query("a")
        await ranks_are_in_the_servers_order(service, http, server)
