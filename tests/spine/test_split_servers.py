"""Prompts and answers on different servers that somebody else has started, where no real vLLM is needed to tell: what
one of them offers goes to the other, and what fails is done without."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from aiohttp import web

from baton_proto.generated import inference_pb2 as pb
from runtime.checkpoint.model_files import resolve_model
from tests.engine.vllm.server.imitation import Imitation
from tests.engine.vllm.server.test_agreement import events_of_an_engine, tokenizer_of
from tests.service import Service, running_service
from tests.spine.prompts import ask
from tests.spine.worker_view import inspect

OFFER = {"remote_engine_id": "p", "remote_block_ids": [[1, 2]], "do_remote_prefill": True}
PROMPT = list(range(5, 45))


class Servers:
    """`offers`: what the prefill server gives back. `arrives`: whether the decode server gets the KV."""

    def __init__(self, folder: Path) -> None:
        tokens = tokenizer_of(resolve_model(str(folder)))
        self.prefill, self.decode = Imitation(self._prompt, tokens), Imitation(self._answer, tokens)
        self.offers: dict[str, Any] | None = OFFER
        self.arrives = True
        self.asked: list[dict[str, Any]] = []  # the decode server

    async def _prompt(self, answer: web.StreamResponse) -> None:
        choices = [{"token_ids": [9], "finish_reason": "length"}]
        await answer.write(msgspec.json.encode({"choices": choices, "kv_transfer_params": self.offers}))

    async def _answer(self, answer: web.StreamResponse) -> None:
        self.asked.append(self.decode.question)
        if "kv_transfer_params" in self.decode.question and not self.arrives:
            await answer.write(b'data: {"error": {"message": "KV load failure", "code": 500}}\n\n')
            return
        for token, finish in ((7, None), (8, "length")):
            chunk = {"choices": [{"token_ids": [token], "finish_reason": finish}]}
            await answer.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")


@pytest.fixture
def servers(tiny_model: Path) -> Servers:
    return Servers(tiny_model)


@asynccontextmanager
async def split(servers: Servers, folder: Path) -> AsyncIterator[Service]:
    async with AsyncExitStack() as stack:
        workers = []
        for role, server in (("prefill", servers.prefill), ("decode", servers.decode)):
            await stack.enter_async_context(server.serving())
            endpoints = await stack.enter_async_context(events_of_an_engine())
            address = msgspec.to_builtins(server.worker)["address"]
            workers.append({"name": f"gpu-{role}", "role": role, "address": address, "model": "m"} | endpoints)
        settings: dict[str, Any] = {
            "external_workers": workers,
            "engine": {"block_size": 32},
            "router": {"placement": {"local_prefill_tokens": 0}},
        }
        yield await stack.enter_async_context(running_service(folder, 0, 0, **settings))


async def test_what_the_prefill_server_offers_goes_to_the_decode_server(servers: Servers, tiny_model: Path) -> None:
    async with split(servers, tiny_model) as service:
        answer = await ask(service.client, PROMPT, 2)
        assert answer.token_ids == [7, 8]
        served = answer.served_by[0]
        assert (served.prefill_worker, served.decode_worker, served.attempts) == ("gpu-prefill", "gpu-decode", 1)
        assert (servers.prefill.question["prompt"], servers.prefill.question["max_tokens"]) == (PROMPT, 1)
        assert (servers.asked[-1]["prompt"], servers.asked[-1]["kv_transfer_params"]) == (PROMPT, OFFER)
        servers.offers = None
        await ask(service.client, PROMPT, 2)
        assert "kv_transfer_params" not in servers.asked[-1], "its connector needs no word"


async def test_kv_that_does_not_come_and_a_prompt_that_is_not_computed_cost_an_attempt(
    servers: Servers, tiny_model: Path
) -> None:
    async with split(servers, tiny_model) as service:
        servers.arrives = False
        answer = await ask(service.client, PROMPT, 2)
        assert (answer.token_ids, answer.served_by[0].attempts) == ([7, 8], 2)
        assert answer.served_by[0].prefill_worker == "", "the decode server has computed it"
        servers.arrives, servers.prefill.refuses = True, (500, "out of order")
        answer = await ask(service.client, PROMPT, 2)
        assert (answer.token_ids, answer.served_by[0].attempts) == ([7, 8], 2)
        decisions = (await service.client.explain(pb.ExplainRequest(request_id=answer.request_id), 60)).decisions
        assert [decision.prefill_worker for decision in decisions] == ["gpu-prefill", ""]


async def test_a_prompt_whose_client_is_out_of_time_ends_at_the_prefill_server(
    servers: Servers, tiny_model: Path
) -> None:
    async def never(_: web.StreamResponse) -> None:
        await asyncio.Event().wait()

    async with split(servers, tiny_model) as service:
        servers.prefill.say = never
        with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
            await ask(service.client, PROMPT, 2, timeout_s=1.0)
        async with asyncio.timeout(60):
            await servers.prefill.gone.wait()
        assert (await inspect(service, "gpu-prefill")).load.prompts == 0
