"""Models that share GPUs and sleep until somebody asks: the first token of a sleeping one, and what swaps leave behind.

    python -m benchmarks.model_swaps [--models 8b,0.6b] [--awake 1] [--swaps 100] [--json FILE]      (one GPU)
    python -m benchmarks.model_swaps --models tiny,tiny --swaps 20                              (on a CPU: does it run)

All models of a service take turns; `--awake` of them have room at once. Weights are random. A prompt of 64 tokens is
asked of each model in turn, greedily; the answer must be the one of the first round. The figure is the time from asking
to the first token, through the router. Between two requests pass `--pause-s`, because a model that has just woken stays
awake for a while. Goals: 1.0 s, and no answer that differs.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from baton.service.sleeping.sleepers import Sleepers
from baton.service.supervisor import Supervisor
from baton_proto.generated import inference_pb2 as pb
from benchmarks.machine import describe, write_result
from benchmarks.random_model import write_model
from benchmarks.shapes import SHAPES
from planner.policy import swap
from runtime.calls.answer import Piece
from runtime.calls.router import Client
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig

GOAL_S = 1.0
PROMPT_TOKENS, ANSWER_TOKENS = 64, 16
TIMEOUT_S = 120.0


async def ask(client: Client, model: str, prompt: list[int]) -> tuple[list[int], float]:
    """The answer, and the seconds to its first token."""
    sampling = pb.SamplingOptions(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    request = pb.GenerateRequest(model=model, tokens=pb.TokenIds(ids=prompt), sampling=sampling)
    began_s, first_s = time.perf_counter(), 0.0

    def on_piece(piece: Piece) -> None:
        nonlocal first_s
        if piece.token_ids and not first_s:
            first_s = time.perf_counter() - began_s

    answer = await client.generate(request, TIMEOUT_S, on_piece)
    return list(answer.token_ids), first_s


def held(process: psutil.Process) -> dict[str, int]:
    """What the processes of the service hold. Shared memory counts once for each that maps it."""
    processes = [process, *process.children(recursive=True)]
    return {
        "files": sum(one.num_fds() for one in processes),
        "MiB": sum(one.memory_info().rss for one in processes) >> 20,
    }


def telling(line: str, *, event: str, **fields: Any) -> None:
    """Nobody listens."""


async def measure(folders: dict[str, Path], arguments: argparse.Namespace) -> dict[str, Any]:
    models = [{"name": name, "model": str(folder), "asleep": "until_asked"} for name, folder in folders.items()]
    changes: dict[str, Any] = {
        "models": models,
        "router": {"http_port": 0, "grpc_port": 0},
        "workers": {"prefill": 0, "decode": 1, "ready_timeout_s": 300.0, "engine": arguments.engine},
        "engine": {"max_model_len": 4096, "kv_memory": arguments.kv_memory},
        "planner": {"limits": {"min_prefill": 0, "gpu_budget": arguments.awake}},
    }
    config = with_overrides(ServingConfig(), changes, "benchmark")
    prompt = [random.Random(0).randrange(3, 500) for _ in range(PROMPT_TOKENS)]
    firsts_s: dict[str, list[float]] = defaultdict(list)
    expected: dict[str, list[int]] = {}
    wrong, before, began_s = 0, dict[str, int](), time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        async with AsyncExitStack() as stack:
            service = await stack.enter_async_context(Supervisor(config, arguments.logs or Path(scratch)))
            await stack.enter_async_context(Sleepers(service, telling))
            client = await stack.enter_async_context(Client(service.address("grpc")))
            start_s = time.perf_counter() - began_s
            print(f"ready after {start_s:.1f} s", flush=True)
            for number in range(-len(folders), arguments.swaps):
                name = list(folders)[number % len(folders)]
                await asyncio.sleep(arguments.pause_s)
                tokens, first_s = await ask(client, name, prompt)
                if number < 0:
                    expected[name] = tokens
                    print(f"{name}: first token after {first_s:.2f} s, the first time", flush=True)
                    continue
                before = before or held(psutil.Process())
                firsts_s[name].append(first_s)
                wrong += tokens != expected[name]
            after = held(psutil.Process())
    return {"start_s": start_s, "first_s": dict(firsts_s), "wrong": wrong, "before": before, "after": after}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8b,0.6b", help=f"of {', '.join(SHAPES)}, tiny")
    parser.add_argument("--awake", type=int, default=1, help="models that have room at once")
    parser.add_argument("--swaps", type=int, default=100)
    parser.add_argument("--pause-s", type=float, default=4.0)
    parser.add_argument("--kv-memory", default="8GiB")
    parser.add_argument("--least-awake", type=float, default=swap.LEAST_AWAKE, help="times as long as a wake took")
    parser.add_argument("--engine", default="baton", help="baton or vllm")
    parser.add_argument("--logs", type=Path, help="folder that keeps the logs of the service")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    vars(swap)["LEAST_AWAKE"] = arguments.least_awake
    with tempfile.TemporaryDirectory() as scratch:
        shapes = arguments.models.split(",")
        written = {shape: write_model(Path(scratch) / shape, shape) for shape in dict.fromkeys(shapes)}
        folders = {f"{shape}-{number}": written[shape] for number, shape in enumerate(shapes)}
        result = asyncio.run(measure(folders, arguments))
    table = Table("model", "swaps", "first token p50, ms", "most, ms", title=f"{arguments.awake} awake at once")
    for name, firsts_s in result["first_s"].items():
        row = (len(firsts_s), f"{statistics.median(firsts_s) * 1e3:.0f}", f"{max(firsts_s) * 1e3:.0f}")
        table.add_row(name, *map(str, row))
    Console().print(table)
    print(f"{result['wrong']} answers differ; held by all processes: {result['before']} -> {result['after']}")
    if arguments.json:
        settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "logs")}
        write_result(arguments.json, {**describe(), "settings": settings, **result})
    slow = any(statistics.median(firsts_s) > GOAL_S for firsts_s in result["first_s"].values())
    return 1 if slow or result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
