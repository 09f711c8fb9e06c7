"""What the same model answers when it is asked alone: one decode worker, one request at a time, no faults."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from baton_proto.generated import inference_pb2 as pb
from runtime.calls.router import Client
from tests.chaos.asking import grpc_request
from tests.chaos.judging.verdict import Expected
from tests.chaos.plan import Ask
from tests.chaos.service.fleet import running_fleet
from tests.chaos.service.scenarios import Device, Engine, Scenario

TIMEOUT_S = 120.0
TIE = 1e-3  # of log probability: float32 implementations differ by 1e-5 and may choose either of two such tokens


class Oracle:
    def __init__(self, client: Client, exact: bool) -> None:
        """`exact`: the engine computes no logits, so no two tokens are close."""
        self._client = client
        self._exact = exact
        self._one_at_a_time = asyncio.Lock()

    async def answer(self, ask: Ask) -> Expected:
        async with self._one_at_a_time:
            answer = await self._client.generate(grpc_request(ask), TIMEOUT_S)
            if ask.sampling["temperature"] or self._exact:
                return Expected(answer.token_ids, answer.text)
            wanted = grpc_request(ask)
            wanted.sampling.logprobs = 2
            first = await self._first_tie(wanted)
            if first is None:
                return Expected(answer.token_ids, answer.text)
            if first == 0:
                return Expected(open=True)
            wanted.sampling.max_tokens = first
            answer = await self._client.generate(wanted, TIMEOUT_S)
            return Expected(answer.token_ids, answer.text, open=True)

    async def _first_tie(self, wanted: pb.GenerateRequest) -> int | None:
        """The first token of a greedy answer whose runner-up is as good."""
        position = 0
        async for response in self._client.stream(wanted, TIMEOUT_S):
            for token in response.piece.logprobs:
                best, other = sorted((top.logprob for top in token.top), reverse=True)[:2]
                if best - other < TIE:
                    return position
                position += 1
        return None


@asynccontextmanager
async def running_oracle(engine: Engine, folder: Path, model: str, device: Device) -> AsyncIterator[Oracle]:
    scenario = Scenario("oracle", 0, 1, engine=engine, overrides={"engine": {"kv_memory": "16MiB"}})
    async with running_fleet(scenario, folder, model, device) as fleet:
        (door,) = fleet.doors.values()
        yield Oracle(door.grpc, exact=engine == "mock")
