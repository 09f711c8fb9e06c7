"""Adapters of a model: each is asked for by its name, and what has it answers as vLLM's own server does."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from runtime.security.bearer_keys import bearer
from tests.service import Service, running_service
from tests.spine.worker_view import until_tree_is_right
from tests.tiny_adapter import RANK, write_tiny_adapter
from tests.tiny_model import write_tiny_model
from tests.vllm.environment import LIMIT_S, PATIENCE_S, START_S
from tests.vllm.server import BLOCK, MODEL, VllmServer, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(LIMIT_S)]

TOKENS = 12
LORA = ("--enable-lora", "--max-loras", "4", "--max-lora-rank", str(RANK))
PROMPT = [token % 500 for token in prompt(2)]


def told(server: VllmServer, name: str) -> dict[str, Any]:
    where = {"address": server.address, "events": server.endpoint, "replay": server.replay_endpoint}
    return {"name": name, "model": MODEL, **where}


def client_of(service: Service) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{service.http_url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0)


async def answer(client: openai.AsyncOpenAI, model: str, tokens: list[int] = PROMPT) -> tuple[str, int]:
    """The greedy answer, and how many tokens of the prompt were cached."""
    completion = await client.completions.create(
        model=model, prompt=tokens, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
    )
    assert completion.model == model
    assert completion.usage is not None
    details = completion.usage.prompt_tokens_details
    return completion.choices[0].text, 0 if details is None else details.cached_tokens or 0


async def own_answer(server: VllmServer, model: str, tokens: list[int] = PROMPT) -> str:
    """The oracle: what vLLM's server says when it is asked itself."""
    body = {"model": model, "prompt": tokens, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    said = await server.client.post("/v1/completions", json=body)
    said.raise_for_status()
    return str(said.json()["choices"][0]["text"])


async def change(service: Service, verb: str, worker: str = "", **body: str) -> tuple[int, Any]:
    """What an operator asks, at `/v1/load_lora_adapter` or `/v1/unload_lora_adapter`: of all workers, or of one."""
    headers = {"authorization": bearer(service.supervisor.keys.operator[0])}
    async with httpx.AsyncClient(base_url=service.http_url, timeout=PATIENCE_S) as http:
        query = {"worker": worker} if worker else {}
        said = await http.post(f"/v1/{verb}_lora_adapter", json=body, headers=headers, params=query)
    return said.status_code, said.json()


class Adapted:
    """A model with two adapters, and what vLLM's own server answers for each."""

    def __init__(self, folder: Path) -> None:
        self.model = write_tiny_model(folder / "base", head_dim=32)
        self.sql, self.poem = (
            str(write_tiny_adapter(folder / name, self.model, seed=seed)) for seed, name in enumerate(("sql", "poem"))
        )
        self.right: dict[str, str] = {}

    def server(self, python: Path, log_file: Path, *modules: str) -> VllmServer:
        flags = [*LORA, "--lora-modules", *modules]
        return VllmServer(python, log_file, flags=flags, num_blocks=64, model=self.model)

    async def ask(self, server: VllmServer) -> None:
        answers = {"base": MODEL, "sql": "sql", "poem": "poem"}
        self.right = {name: await own_answer(server, asked) for name, asked in answers.items()}
        assert len(set(self.right.values())) == 3, "an adapter that changes nothing shows nothing"
        await server.forget()


async def test_adapters_of_servers(vllm_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it in one test, because each server takes a minute to start."""
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
    of = Adapted(tmp_path)
    one = of.server(vllm_python, tmp_path / "0.log", f"sql={of.sql}", f"poem={of.poem}")
    two = of.server(vllm_python, tmp_path / "1.log", f"sql={of.sql}")
    async with AsyncExitStack() as stack:
        for server in (one, two):
            stack.push_async_callback(server.close)
        await asyncio.gather(one.start(), two.start())
        await of.ask(one)
        workers = [told(one, "gpu-0"), told(two, "gpu-1")]
        service = await stack.enter_async_context(
            running_service(of.model, 0, 0, external_workers=workers, engine={"block_size": BLOCK})
        )
        client = client_of(service)
        stack.push_async_callback(client.close)
        await names_are_listed_and_others_are_404(client, {"base", "sql", "poem"})
        await each_name_has_its_own_answer_and_prefixes(client, service, of.right)
        await an_adapter_that_a_server_loads_is_found_there(client, service, two, of.poem)
        one.kill()
        await what_is_lost_with_a_server_is_no_other_models_answer(client, of.right)
        status, rows = await change(service, "load", lora_name="poem", lora_path=of.poem)
        assert (status, rows) == (200, {"workers": [{"worker_id": "gpu-1", "adapters": ["sql", "poem"]}]})
        assert (await answer(client, "poem"))[0] == of.right["poem"]
        two.kill()
        await two.start()  # without the adapter that was loaded
        await until_ready(service, "gpu-1")
        assert (await answer(client, "poem"))[0] == of.right["poem"]


async def test_adapters_of_workers(vllm_python: Path, tmp_path: Path) -> None:
    """Prompts run on a worker of their own, so the KV of an adapter travels, too."""
    of = Adapted(tmp_path)
    server = of.server(vllm_python, tmp_path / "0.log", f"sql={of.sql}", f"poem={of.poem}")
    try:
        await server.start()
        await of.ask(server)
    finally:
        await server.close()
    sections: dict[str, Any] = {
        "workers": {"engine": "vllm", "python": str(vllm_python), "ready_timeout_s": START_S},
        "engine": {"block_size": BLOCK, "kv_memory": "64MiB", "max_model_len": 512},
        "router": {"placement": {"local_prefill_tokens": 0}},
        "adapters": {"sql": of.sql},
        "vllm": {"max_loras": 4, "max_lora_rank": RANK},
    }
    async with running_service(of.model, 1, 1, **sections) as service:
        client = client_of(service)
        await names_are_listed_and_others_are_404(client, {"base", "sql"})
        right = {name: of.right[name] for name in ("base", "sql")}
        await names_asked_for_at_once_are_not_mixed_up(client, right)
        await until_tree_is_right(service)
        status, rows = await change(service, "load", lora_name="essay", lora_path=str(tmp_path / "nowhere"))
        assert status == 503
        assert all("cannot load" in row["problem"] for row in rows["workers"]), rows
        status, rows = await change(service, "load", lora_name="poem", lora_path=of.poem)
        assert (status, len(rows["workers"])) == (200, 2), rows
        await names_asked_for_at_once_are_not_mixed_up(client, of.right)
        (worker,) = service.workers("decode")
        service.kill(worker)
        with pytest.raises(openai.InternalServerError, match="no decode worker that has the adapter poem"):
            await answer(client, "poem")
        await service.start_worker("decode")
        assert (await answer(client, "poem"))[0] == of.right["poem"]
        assert (await change(service, "unload", lora_name="sql"))[0] == 200
        with pytest.raises(openai.APIStatusError, match="sql"):
            await answer(client, "sql")
        assert (await answer(client, "base"))[0] == of.right["base"]
        await client.close()


async def test_an_adapter_whose_workers_are_full_is_loaded_by_one_more(vllm_python: Path, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "base", head_dim=32)
    adapter = str(write_tiny_adapter(tmp_path / "sql", model, seed=0))
    sections: dict[str, Any] = {
        "workers": {"engine": "vllm", "python": str(vllm_python), "ready_timeout_s": START_S},
        "engine": {"block_size": BLOCK, "kv_memory": "64MiB", "max_model_len": 512},
        "router": {"max_running_per_worker": 1},
        "vllm": {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK},
    }
    async with running_service(model, 0, 2, **sections) as service:
        client = client_of(service)

        async def have_answered() -> set[str]:
            return {one.worker_id for one in (await service.client.status()).workers if one.prompt_tokens}

        status, rows = await change(service, "load", "decode-1", lora_name="sql", lora_path=adapter)
        assert (status, rows) == (200, {"workers": [{"worker_id": "decode-1", "adapters": ["sql"]}]})
        right, _ = await answer(client, "sql")
        assert await have_answered() == {"decode-1"}
        async with asyncio.timeout(PATIENCE_S):
            while await have_answered() != {"decode-1", "decode-2"}:
                answers = await asyncio.gather(*(answer(client, "sql") for _ in range(8)))
                assert {text for text, _ in answers} == {right}
        assert (await answer(client, "base"))[0] != right
        await client.close()


async def until_ready(service: Service, worker: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while worker not in {one.worker_id for one in (await service.client.status()).workers if one.state == "ready"}:
            await asyncio.sleep(0.1)


async def names_are_listed_and_others_are_404(client: openai.AsyncOpenAI, names: set[str]) -> None:
    listed = {model.id: model.model_dump() for model in (await client.models.list()).data}
    assert set(listed) == names
    adapters = sorted(names - {"base"})
    assert {listed[name].get("parent") for name in adapters} == {"base"}
    assert "parent" not in listed["base"]
    with pytest.raises(openai.NotFoundError, match=f"essay. is not served here; served: base, {', '.join(adapters)}"):
        await answer(client, "essay")


async def each_name_has_its_own_answer_and_prefixes(
    client: openai.AsyncOpenAI, service: Service, right: dict[str, str]
) -> None:
    for name in right:
        assert await answer(client, name) == (right[name], 0), name
    await until_tree_is_right(service)
    assert await answer(client, "poem") == (right["poem"], BLOCK), "one server alone has it"
    await names_asked_for_at_once_are_not_mixed_up(client, right)


async def names_asked_for_at_once_are_not_mixed_up(client: openai.AsyncOpenAI, right: dict[str, str]) -> None:
    names = [*right] * 8
    answers = await asyncio.gather(*(answer(client, name) for name in names))
    assert [text for text, _ in answers] == [right[name] for name in names]


async def an_adapter_that_a_server_loads_is_found_there(
    client: openai.AsyncOpenAI, service: Service, two: VllmServer, poem: str
) -> None:
    said = await two.client.post("/v1/load_lora_adapter", json={"lora_name": "essay", "lora_path": poem})
    said.raise_for_status()
    async with asyncio.timeout(PATIENCE_S):
        while "essay" not in {model.id for model in (await client.models.list()).data}:
            await asyncio.sleep(0.1)
    assert (await answer(client, "essay"))[0] == await own_answer(two, "essay")
    said = await two.client.post("/v1/unload_lora_adapter", json={"lora_name": "essay"})
    said.raise_for_status()
    with pytest.raises((openai.NotFoundError, openai.BadRequestError), match="essay"):
        await answer(client, "essay")


async def what_is_lost_with_a_server_is_no_other_models_answer(
    client: openai.AsyncOpenAI, right: dict[str, str]
) -> None:
    assert (await answer(client, "sql"))[0] == right["sql"]
    with pytest.raises(openai.InternalServerError, match="no decode worker that has the adapter poem was ready"):
        await answer(client, "poem")
    assert "poem" in {model.id for model in (await client.models.list()).data}
