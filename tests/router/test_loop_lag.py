import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from router.api.grpc.server import GrpcApi
from router.api.http.app import create_app
from router.api.http.server import serve_http
from router.process import COLLECT_AFTER
from tests.router.operator_questions import make_questions
from tests.router.scripted_generator import ScriptedGenerator, make_frontend, tiny_tokenizer

MAX_RATIO = 20.0  # of the lag with a hostile request to the lag with an ordinary one, which takes 2 ms to read


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
async def lag_measured() -> AsyncIterator[LoopLag]:
    lag = LoopLag()
    watch = asyncio.create_task(lag.watch())
    try:
        yield lag
    finally:
        watch.cancel()


@pytest.fixture
def collector_of_a_router() -> Iterator[None]:
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


async def holds(http_port: int, grpc_port: int) -> dict[str, float]:
    """Request and status -> how long it held the loop."""
    held: dict[str, list[float]] = {}
    command = [sys.executable, "-m", "tests.router.hostile_requests", str(http_port), str(grpc_port)]
    client = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert client.stdin is not None
    assert client.stdout is not None
    async with lag_measured() as lag:
        while line := await client.stdout.readline():
            held.setdefault(line.decode().strip(), []).append(lag.longest_s)
            lag.longest_s = 0.0
            client.stdin.write(b"\n")
    assert await client.wait() == 0
    return {name: min(times) for name, times in held.items()}


async def status() -> None: ...


@pytest.mark.usefixtures("collector_of_a_router")
async def test_no_request_holds_the_event_loop_much_longer_than_an_ordinary_one(tiny_model: Path) -> None:
    generator = ScriptedGenerator(tiny_tokenizer(tiny_model))
    generator.max_model_len = 131_072
    frontend = replace(make_frontend(generator), max_body_bytes=8 * 1024 * 1024)
    api = GrpcApi(frontend, make_questions(status))
    async with await serve_http(create_app(frontend, lambda: b""), "127.0.0.1", 0) as server:
        await api.start("127.0.0.1", 0)
        try:
            first, second = await holds(server.port, api.port), await holds(server.port, api.port)
        finally:
            await api.stop()
    assert first.keys() == second.keys()
    lag = {name: min(first[name], second[name]) for name in first}
    ordinary = lag.pop("ordinary 200")
    print({name: f"{1000 * held_s:.1f} ms" for name, held_s in [("ordinary", ordinary), *lag.items()]})
    assert not {name: held_s / ordinary for name, held_s in lag.items() if held_s > MAX_RATIO * ordinary}
