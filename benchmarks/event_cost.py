"""What a streamed token costs the worker's process and the router's: CPU per token and per event, over HTTP and gRPC.

    python -m benchmarks.event_cost [--step-ms 40] [--seconds 8] [--rounds 3] [--api http] [--json FILE]
    python -m benchmarks.event_cost --step-ms 4.5    # SmolLM2's steps on an H200: are events merged when they are late?

The service is real: a router and one decode worker, whose mock engine makes one token of SmolLM2's vocabulary for each
of 256 streams per step, so that nearly every token has text. Each round opens the streams, waits until all have begun,
and measures a stretch in which none begins or ends. CPU times are those of the processes; the client has a process of
its own, and all share the cores of this machine. The worker's figure is less what its mock engine takes for the same
steps without a service. `kept` is the tokens that reach the client as a share of what the engine makes when nobody
holds it up. Every second is a block. Shown are the one with the least CPU of the router per event, and the median of
each figure.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import grpc
import msgspec
import uvloop
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from baton.service.supervisor import Supervisor
from baton_proto.generated import inference_pb2 as pb
from baton_proto.sampling import SamplingParams
from benchmarks.machine import describe, process_cpu_us, write_result
from engine.blocks.block_manager import BlockManager
from engine.core.engine import Engine
from engine.runners.mock_runner import MockRunner
from engine.sequences.sequence import Sequence
from runtime.calls.router import Client
from runtime.checkpoint.mock_model import answer_vocabulary
from runtime.checkpoint.served_model import served_model
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig
from runtime.telemetry.logging import configure_logging

PROMPT_TOKENS = 64
MAX_TOKENS = 8000
BLOCK_TOKENS = 64
SETTLE_S = 1.0  # between the first tokens and the stretch that counts
GENERATE = "/baton.v1.Inference/Generate"


class Block(Struct, frozen=True):
    """One second. us of CPU are per token that reached the router."""

    tokens_per_s: float
    tokens_per_event: float
    router_us: float
    worker_us: float
    client_us: float
    kept: float

    @property
    def router_event_us(self) -> float:
        return self.router_us * self.tokens_per_event


def main() -> None:
    options = _parse()
    config = _service_config(options.step_ms, options.streams)
    configure_logging(config.logging, "benchmark")
    console = Console(width=120)
    engine_us = _engine_us(config, options.streams)
    blocks = asyncio.run(_measure(config, options, engine_us))
    table = Table(title=f"{options.streams} streams, steps of {options.step_ms} ms; the mock engine {engine_us:.1f} us")
    for column in ("", "tokens/s", "kept", "tokens/event", "router us/event", "us/token", "worker us/token", "client"):
        table.add_column(column, justify="right")
    for api, done in blocks.items():
        event_us = [block.router_event_us for block in done]
        for name, one, us in (("least", _least(done), min(event_us)), ("median", _median(done), median(event_us))):
            shares = (f"{one.kept:.2f}", f"{one.tokens_per_event:.2f}", f"{us:.1f}")
            costs = (f"{cost:.1f}" for cost in (one.router_us, one.worker_us, one.client_us))
            table.add_row(f"{api}, {name}", f"{one.tokens_per_s:,.0f}", *shares, *costs)
    console.print(table)
    if options.json:
        facts: dict[str, Any] = {"streams": options.streams, "step_ms": options.step_ms, "engine_us": engine_us}
        write_result(options.json, {**describe(), **facts, "blocks": msgspec.to_builtins(blocks)})


def _least(blocks: list[Block]) -> Block:
    """The block with the least CPU of the router per event."""
    return min(blocks, key=attrgetter("router_event_us"))


def _median(blocks: list[Block]) -> Block:
    """The median of each figure."""
    return Block(*(median(getattr(one, name) for one in blocks) for name in Block.__struct_fields__))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=40.0, help="of the mock engine")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=int, default=8, help="of each round, each a block of its own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--api", choices=CLIENTS, action="append", help="may be given again; default all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.api = options.api or list(CLIENTS)
    if (options.seconds + SETTLE_S) * 1.2e3 / options.step_ms > MAX_TOKENS:
        parser.error(f"answers of {MAX_TOKENS} tokens end before {options.seconds} s are over")
    return options


def _service_config(step_ms: float, streams: int) -> ServingConfig:
    free = dict.fromkeys(("prefill_floor_ms", "prefill_token_ms", "prefill_pair_ms", "decode_sequence_ms"), 0.0)
    overrides: dict[str, Any] = {
        "model": "mock",
        "mock": {"tokenizer": "smollm2", "answer_tokens": MAX_TOKENS},
        "step_times": {"decode_floor_ms": step_ms, "decode_token_ms": 0.0, **free},
        "workers": {"prefill": 0, "decode": 1},
        "router": {"http_port": 0, "grpc_port": 0, "request_timeout_s": 600.0, "max_running_per_worker": streams + 1},
        "engine": {"max_batch_tokens": 32768, "max_running": streams, "block_size": BLOCK_TOKENS},
    }
    return with_overrides(ServingConfig(), overrides, "benchmark")


def _engine_us(config: ServingConfig, streams: int, num_steps: int = 400) -> float:
    """CPU per token of the mock engine alone."""
    files = served_model(config)
    runner = MockRunner(
        config.step_times, config.mock.answer_tokens, answer_vocabulary(files, config.mock), min(files.eos_token_ids)
    )
    engine = Engine(
        runner,
        BlockManager(config.mock.kv_blocks, BLOCK_TOKENS),
        max_batch_tokens=config.engine.max_batch_tokens,
        max_running=streams,
        eos_token_ids=files.eos_token_ids,
        clock=runner.clock,
    )
    for i in range(streams):
        sampling = SamplingParams(max_tokens=MAX_TOKENS, seed=i, ignore_eos=True)
        engine.add(Sequence(str(i), [i] * PROMPT_TOKENS, PROMPT_TOKENS, sampling))
    for _ in range(50):
        engine.step()
    began_s = time.process_time()
    num_tokens = sum(len(engine.step().outputs) for _ in range(num_steps))
    return (time.process_time() - began_s) / num_tokens * 1e6


async def _measure(config: ServingConfig, options: argparse.Namespace, engine_us: float) -> dict[str, list[Block]]:
    blocks: dict[str, list[Block]] = {api: [] for api in options.api}
    async with _service(config) as (service, router, worker), service.client() as client:
        for _ in range(options.rounds):
            for api, done in blocks.items():
                done += await _round(service.address(api), api, client, router, worker, options, engine_us)
    return blocks


@contextlib.asynccontextmanager
async def _service(config: ServingConfig) -> AsyncIterator[tuple[Supervisor, int, int]]:
    """With the process ids of its router and its worker."""
    with tempfile.TemporaryDirectory(prefix="baton-events-") as logs:
        async with Supervisor(config, Path(logs)) as service:
            (worker_id,) = service.children.workers("decode")
            yield service, service.children["router-1"].pid, service.children.of_worker(worker_id).pid


async def _round(
    address: str,
    api: str,
    client: Client,
    router: int,
    worker: int,
    options: argparse.Namespace,
    engine_us: float,
) -> list[Block]:
    async with _streams(api, address, options.streams) as (pid, num_events):

        async def counts() -> list[float]:
            """A clock's seconds, tokens, events, and CPU us of the three processes."""
            cpu = [process_cpu_us(process) for process in (router, worker, pid)]
            status = await client.status()
            return [time.perf_counter(), status.totals.output_tokens, num_events(), *cpu]

        await asyncio.sleep(SETTLE_S)
        marks = [await counts()]
        for _ in range(options.seconds):
            await asyncio.sleep(1.0)
            marks.append(await counts())
    blocks = []
    for before, after in itertools.pairwise(marks):
        seconds, tokens, events, *cpu_us = (b - a for a, b in zip(before, after, strict=True))
        router_us, worker_us, client_us = (us / tokens for us in cpu_us)
        kept = tokens / seconds * options.step_ms / 1e3 / options.streams
        blocks.append(Block(tokens / seconds, tokens / events, router_us, worker_us - engine_us, client_us, kept))
    return blocks


# --- the client: a process of its own ---------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _streams(api: str, address: str, num_streams: int) -> AsyncIterator[tuple[int, Callable[[], int]]]:
    """Opens the streams and waits until all have begun. Gives the client's process id and a count of its events."""
    spawned = multiprocessing.get_context("spawn")
    events, begun = spawned.Value("Q", 0, lock=False), spawned.Event()
    process = spawned.Process(target=_run_client, args=(api, address, num_streams, events, begun), daemon=True)
    process.start()
    try:
        if not await asyncio.to_thread(begun.wait, 60.0):
            raise TimeoutError("the streams did not begin within 60 s")
        assert process.pid is not None
        yield process.pid, lambda: int(events.value)
    finally:
        process.terminate()
        await asyncio.to_thread(process.join)


class Counter(Protocol):
    """Shared with the parent process."""

    value: int


def _run_client(api: str, address: str, num_streams: int, events: Counter, begun: Any) -> None:
    uvloop.run(CLIENTS[api](address, num_streams, events, begun))


async def _over_http(address: str, num_streams: int, events: Counter, begun: Any) -> None:
    host, _, port = address.rpartition(":")
    waiting = set(range(num_streams))

    class Stream(asyncio.Protocol):
        def __init__(self, number: int) -> None:
            self._number = number

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transport.write(_http_request(address, self._number))  # type: ignore[attr-defined]

        def data_received(self, data: bytes) -> None:
            events.value += data.count(b"data: ")
            if waiting and b"data: " in data:
                waiting.discard(self._number)
                if not waiting:
                    begun.set()

    for number in range(num_streams):
        await asyncio.get_running_loop().create_connection(partial(Stream, number), host, int(port))
    await asyncio.Event().wait()


async def _over_grpc(address: str, num_streams: int, events: Counter, begun: Any) -> None:
    waiting = set(range(num_streams))
    async with grpc.aio.insecure_channel(address) as channel:
        generate = channel.unary_stream(GENERATE, request_serializer=pb.GenerateRequest.SerializeToString)

        async def stream(number: int) -> None:
            sampling = pb.SamplingOptions(**_request(number))
            count = 0
            async for _ in generate(
                pb.GenerateRequest(tokens=pb.TokenIds(ids=_prompt(number)), sampling=sampling), timeout=600.0
            ):
                events.value += 1
                count += 1
                if count == 2:  # the first message tells that the request was accepted
                    waiting.discard(number)
                    if not waiting:
                        begun.set()

        await asyncio.gather(*map(stream, range(num_streams)))


def _http_request(address: str, number: int, **changes: Any) -> bytes:
    asked = _request(number) | {"prompt": _prompt(number), "stream": True} | changes
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _request(number: int) -> dict[str, Any]:
    return {"max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": number, "ignore_eos": True}


def _prompt(number: int) -> list[int]:
    return [1000 + number] * PROMPT_TOKENS


CLIENTS = {"http": _over_http, "grpc": _over_grpc}


if __name__ == "__main__":
    main()
