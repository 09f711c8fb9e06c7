"""A vLLM server that runs already, asked through Baton and without it: what such benchmarks have in common."""

import argparse
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from baton.service.supervisor import Supervisor
from benchmarks.machine import describe, write_result
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig
from runtime.telemetry.logging import configure_logging


def parser_of(text: str | None, counts: Sequence[tuple[str, int, str]]) -> argparse.ArgumentParser:
    """counts: name, usual value and help of the options that are numbers."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="as the server names it")
    parser.add_argument("--folder", help="where its tokenizer is, if --model does not say")
    for name in ("server", "events", "replay"):
        parser.add_argument(f"--{name}", required=True)
    for name, count, about in (("block-size", 32, ""), *counts, ("rounds", 3, ""), ("seed", 0, "")):
        parser.add_argument(f"--{name}", type=int, default=count, help=about)
    parser.add_argument("--json", type=Path)
    return parser


@asynccontextmanager
async def both_ways(options: argparse.Namespace) -> AsyncIterator[dict[str, str]]:
    """Runs Baton before the server. Yields the addresses of both."""
    told = {"name": "server", "address": options.server, "events": options.events, "replay": options.replay}
    overrides: dict[str, Any] = {
        "model": options.folder or options.model,
        "served_model_name": options.model,
        "workers": {"prefill": 0, "decode": 0, "ready_timeout_s": 300},
        "engine": {"block_size": options.block_size},
        "external_workers": [told],
        "router": {"http_port": 0, "grpc_port": 0},
    }
    config = with_overrides(ServingConfig(), overrides, "benchmark")
    configure_logging(config.logging, "benchmark")
    with tempfile.TemporaryDirectory(prefix="baton-front-") as logs:
        async with Supervisor(config, Path(logs)) as service:
            yield {"Baton": f"http://{service.address('http')}", "alone": options.server}


async def ask(session: aiohttp.ClientSession, address: str, options: argparse.Namespace, prompt: list[int]) -> float:
    """Milliseconds until the first token. Returns when the answer has ended."""
    body = {"model": options.model, "prompt": prompt, "max_tokens": options.answer, "temperature": 0}
    began_s, first_s = time.perf_counter(), 0.0
    async with session.post(f"{address}/v1/completions", json=body | {"stream": True, "ignore_eos": True}) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not first_s and line.startswith(b"data: "):
                first_s = time.perf_counter()
    return (first_s - began_s) * 1e3


def write_rounds(options: argparse.Namespace, rounds: Any) -> None:
    """Where --json says, if it does."""
    if options.json:
        facts = {name: value for name, value in vars(options).items() if name != "json"}
        write_result(options.json, {**describe(), **json.loads(json.dumps(facts)), "rounds": rounds})
