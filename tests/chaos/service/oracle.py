"""What the same model answers when it is asked alone: one decode worker, one request at a time, no faults."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from runtime.calls.router import Client
from tests.chaos.asking import grpc_request
from tests.chaos.judging.verdict import Expected
from tests.chaos.plan import Ask
from tests.chaos.service.fleet import running_fleet
from tests.chaos.service.scenarios import Device, Engine, Scenario

TIMEOUT_S = 120.0


class Oracle:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._one_at_a_time = asyncio.Lock()

    async def answer(self, ask: Ask) -> Expected:
        async with self._one_at_a_time:
            answer = await self._client.generate(grpc_request(ask), TIMEOUT_S)
        return Expected(answer.token_ids, answer.text)


@asynccontextmanager
async def running_oracle(engine: Engine, folder: Path, model: str, device: Device) -> AsyncIterator[Oracle]:
    scenario = Scenario("oracle", 0, 1, engine=engine, overrides={"engine": {"kv_memory": "16MiB"}})
    async with running_fleet(scenario, folder, model, device) as fleet:
        (door,) = fleet.doors.values()
        yield Oracle(door.grpc)
