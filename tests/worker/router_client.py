"""The request plane as a router uses it: one Steps stream to a worker, requests in, deltas out."""

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from baton_proto.decoding import decoder
from baton_proto.discovery import WorkerLoad
from baton_proto.kv_events import DEFAULT_HASH_SEED
from baton_proto.sampling import SamplingParams, TokenLogprobs
from baton_proto.worker import (
    MAJOR,
    STEPS,
    Cancel,
    Delta,
    Failure,
    Handoff,
    Hello,
    PrefillTarget,
    StepMessage,
    Submit,
    WorkerReport,
)
from runtime.streams.message_stream import open_stream
from tests.worker.worker_process import WorkerProcess

_ids = itertools.count(1)


@dataclass
class Answer:
    """What has arrived for one request so far."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int | None = None
    handoff: Handoff | None = None
    finish: str | None = None
    failure: Failure | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        return self.finish is not None or self.failure is not None

    def apply(self, delta: Delta) -> None:
        assert not self.ended, f"news after the end: {delta}"
        if not self.token_ids:
            self.cached_tokens, self.handoff = delta.prompt_counts and delta.prompt_counts.cached_tokens, delta.handoff
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish, self.failure = delta.finish, delta.failure
        self.changed.set()

    async def tokens(self, count: int, timeout_s: float = 45.0) -> list[int]:
        """Waits for so many tokens, or for the end."""
        async with asyncio.timeout(timeout_s):
            while len(self.token_ids) < count and not self.ended:
                self.changed.clear()
                await self.changed.wait()
        return self.token_ids

    async def end(self, timeout_s: float = 45.0) -> Self:
        async with asyncio.timeout(timeout_s):
            while not self.ended:
                self.changed.clear()
                await self.changed.wait()
        return self


class RouterClient:
    """`async with RouterClient(worker) as router`."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker
        self._answers: dict[str, Answer] = {}
        self.messages: list[StepMessage] = []
        self.loads: list[WorkerLoad] = []

    async def __aenter__(self) -> Self:
        ours = Hello(MAJOR, "router-under-test", self._worker.incarnation, STEPS)
        self._stream, _ = await open_stream(self._worker.addresses["stream"], self._worker.worker_id, ours, 60.0)
        self._stream.listen(decoder(WorkerReport), self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.break_stream()

    async def break_stream(self) -> None:
        self._stream.abort("the test broke it")
        await self._stream.ended()

    async def submit(
        self,
        token_ids: list[int],
        *,
        prefill: PrefillTarget | None = None,
        num_prompt_tokens: int | None = None,
        timeout_s: float = 60.0,
        request_id: str | None = None,
        hash_seed: int = DEFAULT_HASH_SEED,
        **sampling: Any,
    ) -> Answer:
        """Greedy unless told otherwise."""
        answer = Answer(request_id or f"request-{next(_ids)}")
        self._answers[answer.request_id] = answer
        params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling})
        submit = Submit(
            request_id=answer.request_id,
            token_ids=np.array(token_ids, dtype="<u4").tobytes(),
            num_prompt_tokens=num_prompt_tokens or len(token_ids),
            sampling=params,
            timeout_s=timeout_s,
            prefill=prefill,
            hash_seed=hash_seed,
        )
        self._stream.send(submit)
        return answer

    async def cancel(self, answer: Answer) -> None:
        self._stream.send(Cancel(answer.request_id))

    def _read(self, message: StepMessage) -> None:
        self.messages.append(message)
        for delta in message.deltas:
            self._answers[delta.request_id].apply(delta)
