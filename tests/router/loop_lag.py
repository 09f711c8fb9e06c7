"""How long each request of hostile_requests.py holds the event loop of a router over a scripted generator."""

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

from baton_proto.grammar import Grammar
from router.api.grpc.server import GrpcApi
from router.api.http.server import serve_http
from router.requests.body_budget import BodyBudget
from runtime.grammar.checker import GrammarChecker
from runtime.processes.collector import COLLECT_AFTER
from runtime.side_lane import SideLane
from tests.router.api.conversations import app_of
from tests.router.operator_questions import make_questions
from tests.router.scripted_generator import ScriptedGenerator, make_frontend, tiny_tokenizer
from tests.tiny_model import EOS_TOKEN_IDS, VOCAB_SIZE

ORDINARY = "ordinary 200"


async def lags_s(
    model: Path, rounds: int, enough: Callable[[dict[str, float]], bool] = lambda _: False
) -> dict[str, float]:
    """Request and status -> how long it held the loop, in the best of the rounds, which end with `enough`.
    `model`: a tiny one."""
    generator = ScriptedGenerator(tiny_tokenizer(model))
    generator.max_model_len = 131_072
    grammars = _Grammars(model)
    frontend = replace(
        make_frontend(generator), max_body_bytes=8 * 1024 * 1024, bodies=BodyBudget(2**30), grammars=grammars
    )
    api = GrpcApi(frontend, make_questions(_status))
    with _collector_of_a_router():
        async with await serve_http(app_of(frontend), "127.0.0.1", 0) as server:
            await api.start("127.0.0.1", 0)
            try:
                best = await _holds(server.port, api.port, grammars)
                for _ in range(rounds - 1):
                    if enough(best):
                        break
                    again = await _holds(server.port, api.port, grammars)
                    assert again.keys() == best.keys()
                    best = {name: min(held_s, again[name]) for name, held_s in best.items()}
            finally:
                await api.stop()
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


async def _holds(http_port: int, grpc_port: int, grammars: _Grammars) -> dict[str, float]:
    held: dict[str, list[float]] = {}
    command = [sys.executable, "-m", "tests.router.hostile_requests", str(http_port), str(grpc_port)]
    client = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert client.stdin is not None
    assert client.stdout is not None
    async with _lag_measured() as lag:
        while line := await client.stdout.readline():
            held.setdefault(line.decode().strip(), []).append(lag.longest_s)
            lag.longest_s = 0.0
            client.stdin.write(b"\n")
    assert await client.wait() == 0
    grammars.next_round()
    return {name: min(times) for name, times in held.items()}


async def _status() -> None: ...
