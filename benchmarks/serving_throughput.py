"""What the service costs beside its own engine: the same requests through the engine alone, over gRPC, and over HTTP.

    python -m benchmarks.serving_throughput --model 0.6b [--concurrency 256] [--requests 512]
    python -m benchmarks.serving_throughput --model tiny --concurrency 8 --requests 16     (on a CPU: does it run)

One decode worker that prefills for itself, one router, NATS: what `baton up --prefill 0 --decode 1` starts. Weights are
random, written once as a model folder. Prompts are random token ids, answers end after a fixed number of tokens.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from baton.client import Client
from baton.config import ServingConfig
from baton.config_overrides import with_overrides
from baton.supervisor import Supervisor
from baton_proto.generated import inference_pb2 as pb
from baton_proto.sampling import SamplingParams
from benchmarks.machine import describe
from benchmarks.shapes import SHAPES
from engine.block_manager import BlockManager
from engine.engine import Engine
from engine.loaded_model import load_model
from engine.model_files import resolve_model
from engine.sequence import Sequence
from tests.tiny_model import tiny_config, tiny_weights, write_tiny_model

Ask = Callable[[list[int]], Awaitable[int]]
"""Sends a prompt, returns how many tokens came back."""


def write_model(folder: Path, name: str) -> Path:
    """A folder as Hugging Face has them. The tokenizer is the tiny model's: ids go in, text does not matter."""
    if name == "tiny":
        return write_tiny_model(folder)
    shape = SHAPES[name]
    config = tiny_config(shape.architecture) | {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "torch_dtype": "bfloat16",
    }
    write_tiny_model(folder)
    (folder / "config.json").write_text(json.dumps(config))
    # Names and shapes from a model of one layer and a few tokens, numbers from torch: numpy would take minutes.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = tiny_weights(config | {"vocab_size": 1, "num_hidden_layers": 1}, seed=0)
    tensors: dict[str, torch.Tensor] = {}
    for key, value in small.items():
        size = (shape.vocab_size, *value.shape[1:]) if "embed_tokens" in key or "lm_head" in key else value.shape
        copies = range(shape.num_layers) if ".layers.0." in key else (0,)
        for layer in copies:
            numbers = torch.randn(size, device=device, dtype=torch.bfloat16)
            scaled = numbers * 0.1 + 1 if len(size) == 1 else numbers * size[-1] ** -0.5
            tensors[key.replace(".layers.0.", f".layers.{layer}.")] = scaled.cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def serving_config(folder: str, arguments: argparse.Namespace) -> ServingConfig:
    engine = {"max_running": arguments.concurrency, "max_batch_tokens": arguments.max_batch_tokens}
    changes = {
        "router": {"http_port": 0, "grpc_port": 0},
        "workers": {"prefill": 0, "decode": 1, "ready_timeout_s": 120.0},
        "engine": engine | {"block_size": 64, "max_model_len": arguments.prompt + arguments.output + 8},
    }
    return with_overrides(ServingConfig(model=folder), changes, "benchmark")


def prompts(arguments: argparse.Namespace) -> list[list[int]]:
    source = random.Random(arguments.seed)
    return [[source.randrange(3, 500) for _ in range(arguments.prompt)] for _ in range(arguments.requests)]


def run_engine(folder: str, arguments: argparse.Namespace) -> float:
    """Tokens per second of the engine alone, with as many requests in it at a time as the service gets."""
    config = serving_config(folder, arguments).engine
    files = resolve_model(folder, progress=False)
    loaded = load_model(files, config)
    layout = loaded.slab.layout
    engine = Engine(
        loaded.runner,
        BlockManager(layout.num_blocks, layout.block_size),
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        eos_token_ids=files.eos_token_ids,
    )
    waiting = [
        Sequence(
            str(i), list(prompt), len(prompt), SamplingParams(max_tokens=arguments.output, seed=i, ignore_eos=True)
        )
        for i, prompt in enumerate(prompts(arguments))
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
    return num_tokens / (time.perf_counter() - started_s)


async def load(ask: Ask, arguments: argparse.Namespace) -> float:
    """Tokens per second, `concurrency` requests at a time."""
    queue = prompts(arguments)
    num_tokens = 0

    async def caller() -> None:
        nonlocal num_tokens
        while queue:
            answered = await ask(queue.pop())
            num_tokens += answered  # not in one statement: others add while this one waits

    started_s = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(arguments.concurrency)))
    assert num_tokens == arguments.requests * arguments.output, num_tokens
    return num_tokens / (time.perf_counter() - started_s)


async def run_service(folder: str, arguments: argparse.Namespace) -> dict[str, float]:
    results = {}
    with tempfile.TemporaryDirectory() as logs:
        supervisor = Supervisor(serving_config(folder, arguments), log_dir=Path(logs))
        try:
            await supervisor.start()
            async with Client(supervisor.address("grpc")) as client:

                async def grpc(prompt: list[int]) -> int:
                    sampling = pb.SamplingOptions(max_tokens=arguments.output, temperature=1.0, ignore_eos=True)
                    request = pb.GenerateRequest(tokens=pb.TokenIds(ids=prompt), sampling=sampling)
                    return len((await client.generate(request)).token_ids)

                await load(grpc, argparse.Namespace(**vars(arguments) | {"requests": 4, "seed": 1}))
                results["grpc"] = await load(grpc, arguments)
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(timeout=None, trust_env=False, limits=limits) as http:

                async def ask(prompt: list[int]) -> int:
                    body = {"prompt": prompt, "max_tokens": arguments.output, "ignore_eos": True, "stream": True}
                    body |= {"model": "", "stream_options": {"include_usage": True}}
                    usage = 0
                    url = f"http://{supervisor.address('http')}/v1/completions"
                    async with http.stream("POST", url, json=body) as response:
                        response.raise_for_status()
                        async for line in response.aiter_lines():
                            if '"usage":{' in line or '"usage": {' in line:
                                usage = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
                    return usage

                arguments.seed += 2
                results["http"] = await load(ask, arguments)
        finally:
            await supervisor.stop()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SHAPES, "tiny"], default="0.6b")
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--output", type=int, default=256, help="tokens")
    parser.add_argument("--max-batch-tokens", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--engine-of", metavar="FOLDER", help=argparse.SUPPRESS
    )  # a process of its own: it owns the GPU
    arguments = parser.parse_args()
    if arguments.engine_of:
        run_engine(arguments.engine_of, argparse.Namespace(**vars(arguments) | {"seed": 7}))
        print(run_engine(arguments.engine_of, arguments))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(write_model(Path(scratch) / "model", arguments.model))
        command = [sys.executable, "-m", "benchmarks.serving_throughput", *sys.argv[1:], "--engine-of", folder]
        alone = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])
        results = {"engine": alone, **asyncio.run(run_service(folder, arguments))}
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        document: dict[str, Any] = {
            "machine": describe(),
            "settings": vars(arguments) | {"out": None},
            "results": results,
        }
        (arguments.out / f"serving-{arguments.model}.json").write_text(json.dumps(document, indent=1))
    for name, rate in results.items():
        print(f"{name:<8} {rate:10,.0f} tok/s   {100 * (1 - rate / results['engine']):5.1f} % lost")


if __name__ == "__main__":
    main()
