"""A model of a server that somebody else has started beside one of ours, at two routers, for callers with keys: they
share the routers and a caller's limits, and nothing else."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import pytest
from aiohttp import web

from runtime.calls.router import Client
from runtime.checkpoint.model_files import resolve_model
from runtime.security.secret import Secret
from tests.engine.vllm.server.imitation import Imitation
from tests.engine.vllm.server.test_agreement import events_of_an_engine, tokenizer_of
from tests.service import Service, running_service
from tests.spine.oracle import Oracle
from tests.spine.prompts import greedy, random_prompt
from tests.tiny_model import write_tiny_model

FREE, LIMITED = "f" * 40, "l" * 40
ALLOWED = 6  # requests a minute
THEIRS = [7, 8]  # what the server answers to anything
TOKENS = 8


@dataclass
class Two:
    service: Service
    server: Imitation
    ours: Oracle

    async def ask(self, model: str, seed: int = 1, key: str = FREE) -> list[int]:
        """Over a connection of its own, so at whichever router."""
        request = greedy(random_prompt(40, seed=seed), TOKENS if model == "ours" else len(THEIRS))
        request.model = model
        async with Client(self.service.grpc_address, Secret(key)) as client:
            return (await client.generate(request, 60)).token_ids

    def right(self, model: str, seed: int = 1) -> list[int]:
        return self.ours.greedy(random_prompt(40, seed=seed), TOKENS) if model == "ours" else THEIRS


async def _say(answer: web.StreamResponse) -> None:
    for token, finish in zip(THEIRS, (None, "length"), strict=True):
        chunk = {"choices": [{"token_ids": [token], "finish_reason": finish}]}
        await answer.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
    await answer.write(b"data: [DONE]\n\n")


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    ours, theirs = write_tiny_model(tmp_path / "ours", seed=3), write_tiny_model(tmp_path / "theirs", seed=4)
    (tmp_path / "keys").touch(0o600)
    (tmp_path / "keys").write_text(f"{FREE}\n{LIMITED} requests_per_minute={ALLOWED}\n")
    server = Imitation(_say, tokenizer_of(resolve_model(str(theirs))))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(server.serving())
        address = msgspec.to_builtins(server.worker)["address"]
        worker = {"name": "gpu-7", "address": address, "model": "m"} | await stack.enter_async_context(
            events_of_an_engine()
        )
        engine = {"block_size": 32}
        their: dict[str, Any] = {"prefill": 0, "decode": 0, "external_workers": [worker], "engine": engine}
        models = [{"name": "ours", "model": str(ours)}, {"name": "theirs", "model": str(theirs)} | their]
        sections = {"router": {"replicas": 2}, "security": {"api_key_file": str(tmp_path / "keys")}, "models": models}
        service = await stack.enter_async_context(running_service("smollm2", 0, 1, sections))
        yield Two(service, server, Oracle(ours))


@pytest.mark.slow
async def test_each_is_served_by_its_own_at_any_router_and_goes_on_when_a_router_or_the_other_is_lost(two: Two) -> None:
    seeds = range(8)
    asked = [(model, seed) for seed in seeds for model in ("ours", "theirs")]
    assert await asyncio.gather(*(two.ask(*one) for one in asked)) == [two.right(*one) for one in asked]
    status = await two.service.client.status(60)
    assert [*status.routers] == ["router-1", "router-2"]
    assert {worker.worker_id: (worker.model, worker.used) for worker in status.workers} == {
        "decode-ours-1": ("ours", True),
        "gpu-7": ("theirs", True),
    }
    async with httpx.AsyncClient(base_url=two.service.http_url) as http:
        metrics = (await http.get("/metrics", headers={"authorization": f"Bearer {FREE}"})).text
    lines = [line for line in metrics.splitlines() if line.startswith("baton_router_requests_total")]
    counts: Counter[str] = Counter()
    for line in lines:
        name = line.partition('model="')[2].partition('"')[0]
        counts[name] += int(float(line.split()[-1])) if 'outcome="completed"' in line else 0
    assert counts == {"ours": len(seeds), "theirs": len(seeds)}, "of both routers"

    two.service.kill("router-2")
    assert (await two.service.supervisor.wait()).name == "router-2"  # until then the system gives it connections
    assert await two.ask("ours", 9) == two.right("ours", 9)
    assert await two.ask("theirs", 9) == THEIRS
    two.service.kill("decode-ours-1", signal.SIGKILL)
    with pytest.raises(grpc.aio.AioRpcError) as lost:
        await two.ask("ours", 10)
    assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
    assert await two.ask("theirs", 10) == THEIRS


@pytest.mark.slow
async def test_a_caller_has_one_limit_for_all_models_and_another_caller_has_none_of_it(two: Two) -> None:
    async def until_refused(*models: str) -> int:
        """How many are answered that name these in turn."""
        for number, model in enumerate(models):
            try:
                await two.ask(model, number, LIMITED)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                return number
        return len(models)

    assert ALLOWED <= await until_refused(*["ours", "theirs"] * ALLOWED) < 2 * ALLOWED, "routers hear late of others"
    for model in ("ours", "theirs"):
        assert await until_refused(*[model] * ALLOWED) < ALLOWED / 2, "its minute is not up"
    assert await asyncio.gather(two.ask("ours"), two.ask("theirs")) == [two.right("ours"), THEIRS]
