"""Requests for workers that all sleep: they wake, or the caller hears why not."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest

from baton.service.sleeping.model_workers import ModelWorkers
from baton.service.sleeping.sleepers import Sleepers
from runtime.calls.answer import Answer
from tests.service import Service, running_service
from tests.spine.oracle import Oracle
from tests.spine.prompts import ask, random_prompt
from tests.spine.worker_view import until_gone, until_idle
from tests.tiny_model import write_tiny_model

PROMPT = random_prompt(40, seed=1)
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}


def tell(line: str, *, event: str, **fields: object) -> None:
    """Nobody listens."""


@asynccontextmanager
async def waking_service(model: Path, prefill: int = 0, decode: int = 1) -> AsyncIterator[Service]:
    async with running_service(model, prefill, decode) as service, Sleepers(service.supervisor, tell):
        yield service


async def until_all_are(state: str, service: Service) -> None:
    """For the router."""
    async with asyncio.timeout(60):
        while {one.state for one in (await service.client.status(60)).workers} != {state}:
            await asyncio.sleep(0.01)


async def all_asleep(service: Service, level: int = 1) -> None:
    workers = [*service.workers("prefill"), *service.workers("decode")]
    for worker in workers:
        await service.client.sleep(worker, level)
    await until_all_are("sleeping", service)


async def test_requests_wake_the_workers_of_a_model_that_all_sleep(tiny_model: Path, oracle: Oracle) -> None:
    async with waking_service(tiny_model, 1, 2) as service:
        prompts = [random_prompt(40 + i, seed=i) for i in range(6)]
        for level in (1, 2):
            await all_asleep(service, level)
            began_s = time.monotonic()
            answers = await asyncio.gather(*(ask(service.client, prompt, 8) for prompt in prompts))
            print(f"level {level}: all {len(prompts)} answers after {time.monotonic() - began_s:.2f} s")
            assert [answer.token_ids for answer in answers] == [oracle.greedy(prompt, 8) for prompt in prompts]
            await until_all_are("ready", service)  # the first that is awake may have answered all
        await until_idle(service)


async def test_a_stream_has_comments_while_its_worker_wakes(
    tiny_model: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wakes when the client has read one."""
    commented, wake = asyncio.Event(), ModelWorkers.wake

    async def wake_then(workers: ModelWorkers) -> None:
        await commented.wait()
        await wake(workers)

    monkeypatch.setattr(ModelWorkers, "wake", wake_then)
    async with waking_service(tiny_model) as service, httpx.AsyncClient(base_url=service.http_url, timeout=60) as http:
        await all_asleep(service)
        lines: list[str] = []
        async with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                lines.append(line)
                commented.set()
        assert lines[0] == ": waking"
        assert lines[-2] == "data: [DONE]"
        whole = (await http.post("/v1/completions", json=BODY)).json()["choices"][0]
        assert whole["token_ids"] == oracle.greedy(PROMPT, 8)


async def test_a_worker_that_cannot_wake_is_a_503_with_its_reason(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    async with waking_service(folder) as service, httpx.AsyncClient(base_url=service.http_url, timeout=60) as http:
        await all_asleep(service, level=2)
        (tmp_path / "new").mkdir()
        weights = write_tiny_model(tmp_path / "new", seed=1) / "model.safetensors"
        weights.rename(folder / "model.safetensors")
        refused = await http.post("/v1/completions", json=BODY)
        message = refused.json()["error"]["message"]
        assert (refused.status_code, "sleeps on: model" in message, "the weights on disk" in message) == (
            503,
            True,
            True,
        )
        assert int(refused.headers["retry-after"]) >= 1
        with pytest.raises(grpc.aio.AioRpcError, match="the weights on disk"):
            await ask(service.client, PROMPT, 8)


async def test_a_worker_that_is_killed_while_it_wakes_leaves_the_request_to_the_other_one(
    tiny_model: Path, oracle: Oracle
) -> None:
    """Then the last one is killed, too."""
    async with (
        waking_service(tiny_model, decode=2) as service,
        httpx.AsyncClient(base_url=service.http_url, timeout=60) as http,
    ):

        async def asked_in_vain(victim: str) -> "asyncio.Task[Answer]":
            """A request whose worker is killed while it wakes."""
            await all_asleep(service)
            service.kill(victim, signal.SIGSTOP)
            asked = asyncio.create_task(ask(service.client, PROMPT, 8))
            async with asyncio.timeout(60):
                while (await http.get("/v1/models")).json()["data"][0]["state"] == "asleep":
                    await asyncio.sleep(0.01)
            service.kill(victim)
            await until_gone(service, victim)
            return asked

        answer = await (await asked_in_vain("decode-1"))
        assert answer.token_ids == oracle.greedy(PROMPT, 8)
        assert [one.decode_worker for one in answer.served_by] == ["decode-2"]
        with pytest.raises(grpc.aio.AioRpcError, match="worker decode-2: ") as refused:
            await (await asked_in_vain("decode-2"))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
