"""How long each request of hostile_requests.py holds the event loop of a router over a scripted generator, and each of
fanned_out_requests.py that of a router with a worker."""

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from baton_proto.grammar import Grammar
from router.api.http.server import serve_http
from router.api.serving.grpc_api import GrpcApi
from router.requests.body_budget import BodyBudget
from runtime.config.serving import PlacementConfig, RouterConfig
from runtime.grammar.checker import GrammarChecker
from runtime.grammar.compiler import GrammarCompiler
from runtime.processes.collector import COLLECT_AFTER
from runtime.side_lane import SideLane
from tests.router.api.conversations import app_of
from tests.router.operator_questions import make_questions
from tests.router.scripted_generator import ScriptedGenerator, make_frontend, tiny_tokenizer
from tests.router.scripted_worker import ScriptedWorker
from tests.router.small_router import Router
from tests.tiny_model import EOS_TOKEN_IDS, VOCAB_SIZE

ORDINARY = "ordinary 200"


Enough = Callable[[dict[str, float]], bool]


async def lags_s(model: Path, rounds: int, enough: Enough = lambda _: False) -> dict[str, float]:
    """Request and status -> how long it held the loop, in the best of the rounds, which end with `enough`.
    `model`: a tiny one."""
    generator = ScriptedGenerator(tiny_tokenizer(model))
    generator.max_model_len = 131_072
    grammars = _Grammars(model)
    frontend = replace(make_frontend(generator), config=RouterConfig(), bodies=BodyBudget(2**30), grammars=grammars)
    api = GrpcApi(frontend, make_questions(_status))
    with _collector_of_a_router():
        async with await serve_http(app_of(frontend), "127.0.0.1", 0) as server:
            await api.start("127.0.0.1", 0)
            try:

                async def holds() -> dict[str, float]:
                    held = await _holds("tests.router.hostile_requests", str(server.port), str(api.port))
                    grammars.next_round()
                    return held

                return await _best(holds, rounds, enough)
            finally:
                await api.stop()


async def fan_out_lags_s(model: Path, rounds: int, enough: Enough = lambda _: False) -> dict[str, float]:
    """The same for the requests of fanned_out_requests.py, on a router with a worker in a process of its own."""
    tokenizer = tiny_tokenizer(model)
    alone = PlacementConfig(local_prefill_tokens=10**6)  # there is no prefill worker
    config = RouterConfig(max_running_per_worker=2048, no_worker_timeout_s=30.0, placement=alone)
    async with _answering_worker() as worker, AsyncExitStack() as closing:
        router = Router(tokenizer, config)
        closing.push_async_callback(router.pool.close)
        await router.add(worker)
        scripted = make_frontend(ScriptedGenerator(tokenizer), None, GrammarCompiler(model, VOCAB_SIZE, EOS_TOKEN_IDS))
        frontend = replace(scripted, generator=router.generator)
        with _collector_of_a_router():
            async with await serve_http(app_of(frontend), "127.0.0.1", 0) as server:
                return await _best(
                    partial(_holds, "tests.router.fanned_out_requests", str(server.port)), rounds, enough
                )


@asynccontextmanager
async def _answering_worker() -> AsyncIterator[ScriptedWorker]:
    """How to reach it; see answering_worker.py."""
    command = [sys.executable, "-m", "tests.router.answering_worker", "decode-0"]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        worker = ScriptedWorker("decode-0")
        worker.address, worker.stream_address = (await process.stdout.readline()).decode().split()
        yield worker
    finally:
        process.stdin.close()
        assert await process.wait() == 0


async def _best(holds: Callable[[], Awaitable[dict[str, float]]], rounds: int, enough: Enough) -> dict[str, float]:
    best = await holds()
    for _ in range(rounds - 1):
        if enough(best):
            break
        again = await holds()
        assert again.keys() == best.keys()
        best = {name: min(held_s, again[name]) for name, held_s in best.items()}
    return best


class _Grammars:
    """A checker per round, so that each round has a first grammar."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._checker = self._fresh()

    def _fresh(self) -> GrammarChecker:
        return GrammarChecker(self._model, VOCAB_SIZE, EOS_TOKEN_IDS)

    async def check_soon(
        self, grammar: Grammar, name: str, deadline_s: float | None = None, lane: SideLane | None = None
    ) -> Grammar:
        return await self._checker.check_soon(grammar, name, deadline_s, lane)

    def next_round(self) -> None:
        self._checker.close()
        self._checker = self._fresh()


class LoopLag:
    """The longest time in which the event loop did not come around. Because other processes hold it up too, a time in
    which this process had no CPU does not count."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        while True:
            began_s, cpu_s = time.perf_counter(), time.process_time()
            await asyncio.sleep(0)
            held_s = min(time.perf_counter() - began_s, time.process_time() - cpu_s)
            self.longest_s = max(self.longest_s, held_s)


@asynccontextmanager
async def _lag_measured() -> AsyncIterator[LoopLag]:
    lag = LoopLag()
    watch = asyncio.create_task(lag.watch())
    try:
        yield lag
    finally:
        watch.cancel()


@contextmanager
def _collector_of_a_router() -> Iterator[None]:
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


async def _holds(client_module: str, *ports: str) -> dict[str, float]:
    held: dict[str, list[float]] = {}
    command = [sys.executable, "-m", client_module, *ports]
    client = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert client.stdin is not None
    assert client.stdout is not None
    async with _lag_measured() as lag:
        while line := await client.stdout.readline():
            held.setdefault(line.decode().strip(), []).append(lag.longest_s)
            lag.longest_s = 0.0
            client.stdin.write(b"\n")
    assert await client.wait() == 0
    return {name: min(times) for name, times in held.items()}


async def _status() -> None: ...
