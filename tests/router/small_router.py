"""All of a router but discovery, events and the client APIs, on scripted workers: what the generation tests run on."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from baton_proto.sampling import SamplingParams
from baton_proto.token_counts import TokenCounts
from baton_proto.waking import Outcome
from baton_proto.worker import Delta, Failure, Submit
from router.counters.metrics import RouterMetrics
from router.index.holders import Holders
from router.index.match import Match
from router.placement.assignment import Assigner
from router.placement.expected_prefixes import ExpectedPrefixes
from router.placement.weights import Weights
from router.requests.admission import AdmissionQueue
from router.requests.choice import Parts
from router.requests.generation import Generator
from router.requests.request import Finished, GenerateRequest, Piece
from router.text.tokenizer import Tokenizer
from router.workers.account import LoadView
from router.workers.load import LoadLedger
from router.workers.pool import WorkerPool
from router.workers.waking import Waking
from runtime.config.serving import RouterConfig
from runtime.discovery.worker_key import WorkerKey
from runtime.errors import (
    BatonError,
)
from tests.router.scripted_worker import (
    Script,
    ScriptedWorker,
    answer_until,
)

PROMPT = list(range(50, 90))
CONFIG = RouterConfig(no_worker_timeout_s=0.3, placement=Weights(local_prefill_tokens=0))


@dataclass
class Holdings:
    """A radix tree of sorts: how many blocks of every prompt each worker holds."""

    cached: dict[WorkerKey, int] = field(default_factory=dict)

    def match(self, hashes: NDArray[np.uint64]) -> Match:
        roster = Holders()
        return Match([], [(blocks, roster.add(worker)) for worker, blocks in self.cached.items()], roster, b"", 0)


async def nobody_wakes(timeout_s: float) -> Outcome:
    return Outcome("none")


class Router:
    """All of a router but discovery, events and the client APIs."""

    def __init__(self, tokenizer: Tokenizer, config: RouterConfig) -> None:
        self.queue = AdmissionQueue(config.queue_limit)
        self.ledger = LoadLedger(16, relieved=self.queue.wake)
        self._changed = asyncio.Event()
        self.pool = WorkerPool("router-0", "tiny", 16, self.ledger, changed=self._on_change)
        self.metrics = RouterMetrics()
        self.expected = ExpectedPrefixes()
        assigner = Assigner(self.pool, Holdings(), self.ledger, config, random.Random(1), self.expected)
        self.waking = Waking(nobody_wakes, 60.0)
        parts = Parts(tokenizer, 16, config, self.pool, assigner, self.queue, self.metrics, self.waking)
        self.generator = Generator(parts, max_model_len=4096)

    def _on_change(self) -> None:
        self._changed.set()
        self.queue.wake()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def add(self, *workers: ScriptedWorker) -> None:
        for worker in workers:
            self.pool.apply(worker.added())
        await self.until(lambda: all(worker.link.connected for worker in self.pool.workers.values()))

    def check_idle(self) -> None:
        """Nothing is charged, queued or in flight."""
        assert self.queue.view()[:2] == (0, 0)
        for worker in self.pool.workers.values():
            assert worker.link.in_flight == 0
            assert self.ledger.view(worker.key) == LoadView(0, 0, 0)


@asynccontextmanager
async def routing(
    tokenizer: Tokenizer, *workers: ScriptedWorker, config: RouterConfig = CONFIG
) -> AsyncIterator[Router]:
    async with AsyncExitStack() as stack:
        router = Router(tokenizer, config)
        stack.push_async_callback(router.pool.close)
        for worker in workers:
            await stack.enter_async_context(worker)
        await router.add(*workers)
        yield router
        for worker in workers:
            assert not worker.problems


def request(
    max_tokens: int = 10, *, n: int = 1, stop: tuple[str, ...] = (), timeout_s: float = 60.0, priority: int = 0
) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{time.monotonic_ns()}",
        prompt=np.array(PROMPT, dtype=np.uint32),
        sampling=tuple(SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=i) for i in range(n)),
        stop=stop,
        deadline_s=time.monotonic() + timeout_s,
        priority=priority,
    )


@dataclass
class Result:
    tokens: dict[int, list[int]]
    texts: dict[int, str]
    reasons: dict[int, str]
    finished: Finished


async def collect(stream: AsyncIterator[Piece | Finished]) -> Result:
    result = Result({}, {}, {}, Finished(TokenCounts()))
    async for item in stream:
        if isinstance(item, Finished):
            result.finished = item
            continue
        assert item.index not in result.reasons, "a piece after the last one"
        result.tokens.setdefault(item.index, []).extend(item.token_ids)
        result.texts[item.index] = result.texts.get(item.index, "") + item.text
        if item.finish_reason is not None:
            result.reasons[item.index] = item.finish_reason
    return result


async def watching(pieces: AsyncIterator[Piece | Finished], seen: list[int]) -> AsyncIterator[Piece | Finished]:
    """Notes the tokens as they pass."""
    async for item in pieces:
        if isinstance(item, Piece):
            seen += item.token_ids
        yield item


def stream(router: Router, request: GenerateRequest) -> AsyncGenerator[Piece | Finished, None]:
    return cast("AsyncGenerator[Piece | Finished, None]", router.generator.generate(request))


def text_of(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    return tokenizer.decode(token_ids)


@contextmanager
def fails_with(kind: type[BatonError], match: str) -> Iterator[None]:
    with pytest.raises(kind, match=match) as caught:
        yield
    assert type(caught.value) is kind


def then_fail(num_tokens: int, failure: Failure) -> Script:
    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        await answer_until(worker, submit, num_tokens)
        worker.send(Delta(submit.request_id, failure=failure))

    return script


def then_hang(num_tokens: int) -> Script:
    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        await answer_until(worker, submit, num_tokens)

    return script


async def silent(worker: ScriptedWorker, submit: Submit) -> None:
    pass
