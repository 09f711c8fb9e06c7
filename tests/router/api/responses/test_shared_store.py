"""Two routers with one NATS: what one has answered the other goes on from, also when the first is gone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from baton.service.local.nats_server import NatsServer
from router.api.responses.shared_store import SharedResponseStore
from router.siblings import Siblings
from runtime.nats.client import connect
from tests.router.api.conversations import openai_client, prompt_of, serving, talking_frontend
from tests.router.scripted_generator import MODEL, ScriptedGenerator

ASKED: dict[str, Any] = {"model": MODEL, "input": "When does it rain?"}
LARGE = 123456789012345678901234567890  # as a model writes it into a call
CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": f'{{"a": {LARGE}}}'}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "3"}

Clients = list[openai.AsyncOpenAI]


@pytest.fixture
async def clients(nats_server: NatsServer, generator: ScriptedGenerator, folder: Path) -> AsyncIterator[Clients]:
    """Of two routers."""
    names = ["router-1", "router-2"]
    async with AsyncExitStack() as closing:
        clients = []
        for name in names:
            nats = await connect(nats_server.url, name, timeout_s=60)
            closing.push_async_callback(nats.close)
            store = SharedResponseStore(nats, Siblings(nats, name, lambda: names), 1 << 20, len(names))
            await store.start()
            server = await closing.enter_async_context(serving(talking_frontend(generator, folder), store))
            clients.append(await closing.enter_async_context(openai_client(server)))
        yield clients


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_goes_on_at_another_router_and_is_deleted_at_all(
    clients: Clients, generator: ScriptedGenerator, stream: bool
) -> None:
    first, second = clients
    given: Any = [{"role": "user", "content": "Add."}, CALL, RESULT]
    answer: Any = await first.responses.create(model=MODEL, input=given, stream=stream)
    response = [event async for event in answer][-1].response if stream else answer
    more = await second.responses.create(model=MODEL, input="Sure?", previous_response_id=response.id)
    told = prompt_of(generator)
    assert "user\nAdd.<|im_end|>" in told
    assert f'add:{{"a": {LARGE}}}' in told
    assert "user\nSure?<|im_end|>" in told
    assert (await second.responses.retrieve(response.id)).output_text == response.output_text
    await second.responses.delete(response.id)
    for client in clients:
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)
    assert (await first.responses.retrieve(more.id)).id == more.id


async def test_while_nats_is_away_a_router_goes_on_from_its_own(clients: Clients, nats_server: NatsServer) -> None:
    first, second = clients
    kept = await first.responses.create(**ASKED)
    await nats_server.kill()
    own = await first.responses.create(**ASKED, previous_response_id=kept.id)
    with pytest.raises(openai.BadRequestError, match="is not here"):
        await second.responses.create(**ASKED, previous_response_id=own.id)
    await nats_server.restart(lose_storage=True)
    async with asyncio.timeout(60):
        while True:
            last = await first.responses.create(**ASKED, previous_response_id=own.id)
            try:
                await second.responses.retrieve(last.id)
                break
            except openai.NotFoundError:  # as long as one of them is not connected again
                continue
