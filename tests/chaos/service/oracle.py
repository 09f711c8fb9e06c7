"""What the same model answers when it is asked alone: one decode worker, one request at a time, no faults."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from baton_proto.generated import inference_pb2 as pb
from runtime.calls.answer import Answer
from runtime.calls.router import Client
from tests.chaos.asking import grpc_request
from tests.chaos.judging.verdict import Expected
from tests.chaos.plan import Ask
from tests.chaos.service.fleet import running_fleet
from tests.chaos.service.scenarios import Device, Engine, Scenario
from tests.tiny_model import VOCAB_SIZE

TIMEOUT_S = 120.0
TIE = 1e-3  # of log probability: float32 implementations differ by 1e-5 and may choose either of two such tokens


class Oracle:
    def __init__(self, client: Client, exact: bool) -> None:
        """`exact`: the engine computes no logits, so no two tokens are close."""
        self._client = client
        self._exact = exact
        self._one_at_a_time = asyncio.Lock()

    async def answer(self, ask: Ask) -> Expected:
        """What its own model answers, whichever `ask` names."""
        ask = replace(ask, model="")
        async with self._one_at_a_time:
            answer = await self._client.generate(grpc_request(ask), TIMEOUT_S)
            if ask.sampling["temperature"] or self._exact:
                return Expected(answer.token_ids, answer.text, answer.finish_reason)
            wanted = grpc_request(ask)
            first = await (self._first_tie(wanted) if ask.grammar is None else self._first_shaky(wanted, answer))
            if first is None:
                return Expected(answer.token_ids, answer.text, answer.finish_reason)
            if first == 0:
                return Expected(open=True)
            wanted.sampling.max_tokens = first
            answer = await self._client.generate(wanted, TIMEOUT_S)
            return Expected(answer.token_ids, answer.text, open=True)

    async def _first_tie(self, wanted: pb.GenerateRequest) -> int | None:
        """The first token of a greedy answer whose runner-up is as good."""
        wanted = copy(wanted, logprobs=2)
        position = 0
        async for response in self._client.stream(wanted, TIMEOUT_S):
            for token in response.piece.logprobs:
                best, other = sorted((top.logprob for top in token.top), reverse=True)[:2]
                if best - other < TIE:
                    return position
                position += 1
        return None

    async def _first_shaky(self, wanted: pb.GenerateRequest, answer: Answer) -> int | None:
        """The same of an answer with a grammar. Because log probabilities do not tell which tokens were allowed, each
        logit is moved by up to TIE / 2, and then by as much the other way: it is the first token that changes."""
        moved = {token: random.Random(token).uniform(-TIE / 2, TIE / 2) for token in range(VOCAB_SIZE)}
        places = []
        for sign in (1, -1):
            bias = {token: sign * by for token, by in moved.items()}
            other = await self._client.generate(copy(wanted, logit_bias=bias), TIMEOUT_S)
            places += [
                at for at, pair in enumerate(zip_longest(answer.token_ids, other.token_ids)) if pair[0] != pair[1]
            ]
        return min(places, default=None)


def copy(request: pb.GenerateRequest, **options: Any) -> pb.GenerateRequest:
    """A copy with other sampling options."""
    copied = pb.GenerateRequest()
    copied.CopyFrom(request)
    copied.sampling.MergeFrom(pb.SamplingOptions(**options))
    return copied


@asynccontextmanager
async def running_oracle(engine: Engine, folder: Path, model: str, device: Device) -> AsyncIterator[Oracle]:
    scenario = Scenario("oracle", 0, 1, engine=engine, overrides={"engine": {"kv_memory": "16MiB"}})
    async with running_fleet(scenario, folder, model, device) as fleet:
        (door,) = fleet.doors.values()
        yield Oracle(door.grpc, exact=engine == "mock")
