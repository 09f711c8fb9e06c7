"""Cost of the service around its engine: the same requests through the engine alone, over gRPC, and over HTTP.

    python -m benchmarks.serving_throughput --model 0.6b [--concurrency 256] [--requests 512]
    python -m benchmarks.serving_throughput --model smollm2        (SmolLM2 itself, as `make` installs it)
    python -m benchmarks.serving_throughput --model tiny --concurrency 8 --requests 16     (on a CPU: does it run)
    python -m benchmarks.serving_throughput --model 0.6b --tokenizer FOLDER --peer 'vllm serve {model} --port {port}'
        [--peer 'baton up --config vllm.yaml --model {model} --set served_model_name={model} --http-port {port}']

One decode worker that prefills for itself, one router, NATS: what `baton up --prefill 0 --decode 1` starts. Weights are
random, written once as a model folder. Prompts are random token ids. When all answers have one length (`--output 256`),
they end in one step, and the next 256 requests come together. The clients have processes of their own.

Without a tokenizer most tokens have no text, and few events leave. With one, the model has its vocabulary, and nearly
every token is an event; so it is with SmolLM2, whose weights and tokenizer are its own. The peer serves the same folder
to the same HTTP clients, when our own processes have ended.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, Protocol

import uvloop

from baton.service.supervisor import Supervisor
from baton_proto.generated import inference_pb2 as pb
from baton_proto.sampling import SamplingParams
from benchmarks.frontend.load_client import END_OF_BODY
from benchmarks.machine import describe, write_result
from benchmarks.shapes import SHAPES, blocks_of
from benchmarks.whole.servers import running
from runtime.calls.router import Client
from runtime.checkpoint.model_files import SMOLLM2, resolve_model
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig
from runtime.processes.ports import free_port


def serving_config(folder: str, arguments: argparse.Namespace) -> ServingConfig:
    engine = {"max_running": arguments.concurrency, "max_batch_tokens": arguments.max_batch_tokens}
    changes = {
        "router": {"http_port": 0, "grpc_port": 0},
        "workers": {"prefill": 0, "decode": 1, "ready_timeout_s": 120.0},
        "engine": engine
        | {"block_size": 64, "max_model_len": (arguments.prompt or LENGTHS[1]) + (arguments.output or LENGTHS[1]) + 8},
    }
    return with_overrides(ServingConfig(model=folder, served_model_name=folder), changes, "benchmark")


LENGTHS = (100, 1024)
PEER_READY_S = 420.0

Work = tuple[list[int], int]
"""A prompt, and how many tokens it is answered with."""


def all_work(arguments: argparse.Namespace) -> list[Work]:
    source = random.Random(arguments.seed)
    highest = 49000 if arguments.tokenizer or arguments.model == SMOLLM2 else 500

    def length(wanted: int | tuple[int, int] | None) -> int:
        return wanted if isinstance(wanted, int) else source.randint(*(wanted or LENGTHS))

    return [
        (
            [source.randrange(3, highest) for _ in range(length(arguments.prompt))],
            length(arguments.output),
        )
        for _ in range(arguments.requests)
    ]


def run_engine(folder: str, arguments: argparse.Namespace) -> float:
    """Tokens per second of the engine alone, with as many requests at a time as the service gets."""
    # Here, because torch takes seconds to import, and each client is a process that imports this file.
    from engine.core.engine import Engine
    from engine.loading.loaded_model import load_model
    from engine.sequences.sequence import Sequence

    config = serving_config(folder, arguments).engine
    files = resolve_model(folder, progress=False)
    loaded = load_model(files, config)
    engine = Engine(
        loaded.runner,
        blocks_of(loaded.slab.layout, files.config),
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        eos_token_ids=files.eos_token_ids,
    )
    waiting = [
        Sequence(str(i), list(prompt), len(prompt), SamplingParams(max_tokens=output, seed=i, ignore_eos=True))
        for i, (prompt, output) in enumerate(all_work(arguments))
    ]
    num_running = num_tokens = 0
    started_s = time.perf_counter()
    while waiting or engine.has_work:
        while waiting and num_running < arguments.concurrency:
            engine.add(waiting.pop())
            num_running += 1
        for output in engine.step().outputs:
            num_tokens += len(output.token_ids)
            num_running -= output.finish is not None
    rate = num_tokens / (time.perf_counter() - started_s)
    loaded.close()
    return rate


async def run_service(folder: str, arguments: argparse.Namespace, alone: float) -> dict[str, float]:
    results = {"engine": alone}
    with tempfile.TemporaryDirectory() as logs:
        supervisor = Supervisor(serving_config(folder, arguments), log_dir=Path(logs))
        try:
            await supervisor.start()
            # As the engine alone and the peers, which run twice: first uses load kernels.
            await asyncio.to_thread(run_clients, "http", supervisor.address("http"), arguments)
            for api in ("grpc", "http"):
                rate = await asyncio.to_thread(run_clients, api, supervisor.address(api), arguments)
                results[api] = rate
                if api == "http":
                    results["events per answer"] = arguments.events / arguments.requests
                print(f"{api:<8} {rate:10,.0f} tok/s   {100 * (1 - rate / alone):5.1f} % lost", flush=True)
        finally:
            await supervisor.stop()
    return results


# --- clients: in processes of their own, so that they do not slow the measured ones -----------------------------------


def run_clients(api: str, address: str, arguments: argparse.Namespace) -> float:
    """Tokens per second of all clients together."""
    arguments.seed += 1  # so that no prompt is sent twice
    everything = all_work(arguments)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for number in range(arguments.clients):
        ours, theirs = context.Pipe()
        work = everything[number :: arguments.clients]
        concurrency = len(range(number, arguments.concurrency, arguments.clients))
        process = context.Process(target=_client, args=(theirs, api, address, arguments.served, work, concurrency))
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            pipe.recv()
        began_s = time.perf_counter()
        for pipe in pipes:
            pipe.send("go")
        counts = [pipe.recv() for pipe in pipes]
        duration_s = time.perf_counter() - began_s
    finally:
        for process in processes:
            process.terminate()
            process.join()
    num_tokens, arguments.events = (sum(column) for column in zip(*counts, strict=True))
    assert num_tokens == sum(output for _, output in everything), num_tokens
    return num_tokens / duration_s


def _client(pipe: Connection, api: str, address: str, model: str, work: list[Work], concurrency: int) -> None:
    kind = partial(GrpcAsker if api == "grpc" else HttpAsker, address, model)
    uvloop.run(_run_client(pipe, kind, work, concurrency))


async def _run_client(pipe: Connection, asker: "Callable[[], Asker]", work: list[Work], concurrency: int) -> None:
    first = asker()
    await first.connect()
    await first.ask([3, 4, 5], 2)
    pipe.send("ready")
    await asyncio.to_thread(pipe.recv)
    askers = [
        asker() for _ in range(concurrency)
    ]  # connect only now, because the server closes connections that are idle for long
    for one in askers:
        await one.connect()
    answered = events = 0

    async def caller(one: Asker) -> None:
        nonlocal answered, events
        while work:
            count, messages = await one.ask(*work.pop())
            events += messages
            answered += count  # a statement of its own, because other tasks add while this one waits

    await asyncio.gather(*map(caller, askers))
    pipe.send((answered, events))


class Asker(Protocol):
    """One connection with one request in flight."""

    async def connect(self) -> None: ...

    async def ask(self, prompt: list[int], output: int) -> tuple[int, int]:
        """Sends a request and reads its answer. Returns the number of its tokens, and of the events of an HTTP
        stream."""
        ...


class GrpcAsker:
    _clients: ClassVar[list[Client]] = []  # one channel per process, as gRPC clients usually have

    def __init__(self, address: str, model: str) -> None:
        self._address = address

    async def connect(self) -> None:
        if not self._clients:
            self._clients.append(Client(self._address))

    async def ask(self, prompt: list[int], output: int) -> tuple[int, int]:
        sampling = pb.SamplingOptions(max_tokens=output, temperature=1.0, ignore_eos=True)
        request = pb.GenerateRequest(tokens=pb.TokenIds(ids=prompt), sampling=sampling)
        return len((await self._clients[0].generate(request)).token_ids), 0


class HttpAsker:
    def __init__(self, address: str, model: str) -> None:
        self._address = address
        self._body = {"ignore_eos": True, "stream": True, "model": model, "stream_options": {"include_usage": True}}

    async def connect(self) -> None:
        host, _, port = self._address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))

    async def ask(self, prompt: list[int], output: int) -> tuple[int, int]:
        body = json.dumps(self._body | {"prompt": prompt, "max_tokens": output}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._address}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        answer = bytearray()
        while not answer.endswith(END_OF_BODY):
            data = await self._reader.read(1 << 16)
            assert data, f"connection closed: {bytes(answer[:1000])!r}"
            answer += data
        (count,) = re.findall(rb'"completion_tokens":\s*(\d+)', answer)
        return int(count), answer.count(b"data: ")


def run_peer(peer: str, folder: str, arguments: argparse.Namespace) -> float:
    """Tokens per second of the peer's server. Raises UnavailableError when it does not start."""
    port = free_port("127.0.0.1")
    with tempfile.TemporaryDirectory() as logs:
        command = shlex.split(peer.format(model=folder, port=port))
        with running(command, port, Path(logs) / "server.log", PEER_READY_S):
            rates = [run_clients("http", f"127.0.0.1:{port}", arguments) for _ in range(2)]
    return max(rates)  # the first one warms it up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SHAPES, "tiny"], default="0.6b")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prompt", type=int, help="tokens; default: uniform in 100-1024, as nano-vllm's bench has it")
    parser.add_argument("--output", type=int, help="tokens, likewise")
    parser.add_argument("--max-batch-tokens", type=int, default=8192)
    parser.add_argument("--clients", type=int, default=4, help="processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, help="a model folder: every token of its vocabulary has text")
    parser.add_argument(
        "--peer",
        metavar="COMMAND",
        action="append",
        default=[],
        help="a server to measure beside, may be given again; {model} and {port} are filled in",
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--engine-of", metavar="FOLDER", help=argparse.SUPPRESS
    )  # in a process of its own, because the engine owns the GPU
    arguments = parser.parse_args()
    if arguments.engine_of:
        run_engine(arguments.engine_of, argparse.Namespace(**vars(arguments) | {"seed": 7}))
        print(run_engine(arguments.engine_of, arguments))
        return
    from benchmarks.random_model import write_model

    with tempfile.TemporaryDirectory() as scratch:
        if arguments.model == SMOLLM2:
            folder = str(resolve_model(SMOLLM2, progress=True).folder)
        else:
            folder = str(write_model(Path(scratch) / "model", arguments.model, arguments.tokenizer))
        arguments.served = folder
        command = [sys.executable, "-m", "benchmarks.serving_throughput", *sys.argv[1:], "--engine-of", folder]
        alone = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])
        print(f"engine   {alone:10,.0f} tok/s", flush=True)
        results = asyncio.run(run_service(folder, arguments, alone))
        print(f"{results['events per answer']:.0f} events per answer", flush=True)
        for number, peer in enumerate(arguments.peer, start=1):
            rate = results[f"peer {number}"] = run_peer(peer, folder, arguments)
            events, ratio = arguments.events / arguments.requests, results["http"] / rate
            print(f"peer {number} {rate:10,.0f} tok/s   {events:.0f} events per answer; ours {ratio:.2f}x", flush=True)
    if arguments.out:
        document: dict[str, Any] = {
            "machine": describe(),
            "settings": vars(arguments) | {"out": None, "tokenizer": str(arguments.tokenizer)},
            "results": results,
        }
        write_result(arguments.out / f"serving-{arguments.model}.json", document)


if __name__ == "__main__":
    main()
