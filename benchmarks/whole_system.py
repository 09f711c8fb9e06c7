"""The whole beside what a user would start instead: `vllm serve`, Baton's mixed workers, Baton split, on the same GPUs.

    python -m benchmarks.whole_system --model 8b --conversations FILE --code FILE --out FOLDER      (a host with GPUs)
        [--vllm 'env PYTHONPATH=/site python3 serve.py --model {model}'] [--tokenizer FOLDER] [--advise --profile FILE]
    python -m benchmarks.whole_system --systems mixed --traces agents --rates 6 --seeds 0 --out FOLDER         (a part)
    python -m benchmarks.whole_system --merge PARTS/*/runs.json [--advise --profile FILE] --out FOLDER    (all, as one)
    python -m benchmarks.whole_system --model mock --traces agents --rates 2 --requests 20    (no GPU: does it run)

Each system starts once, is warmed up, and gets every load one after the other. All have the same model folder, client
(`baton bench`, streamed completions) and prompts; each load has texts of its own, so that it finds nothing of the load
before in a cache. Requests ask for answers of an exact length, and every answer is checked. A seed is another window of
a recorded trace, or other agents, and other arrivals. `+-` and ratios are over seeds, ratios seed by seed.

FOLDER gets runs.json after each load, and the servers' logs. Exit code 1: a goal is missed, or an answer is wrong.
"""

import argparse
import asyncio
import json
import multiprocessing
import signal
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console

from baton.bench.measured import Timing
from baton.bench.open_ai import Endpoint, Wishes
from baton.bench.sweep import Sweep
from baton.bench.workload import Amount, TraceLine
from benchmarks.machine import describe, write_result
from benchmarks.random_model import write_model
from benchmarks.shapes import SHAPES
from benchmarks.whole.arguments import TINY, parsed
from benchmarks.whole.document import Document, merged
from benchmarks.whole.figures import Cell, Run, summed_up
from benchmarks.whole.report import Comparison, Expectation, show
from benchmarks.whole.servers import NAME, System, parse_system, running
from benchmarks.whole.traces import CODE, CONVERSATIONS, traffic, write_trace
from runtime.checkpoint.model_files import SMOLLM2, resolve_model
from runtime.errors import BatonError, UnavailableError
from runtime.processes.ports import free_port

TEMPERATURE = 0.6

T = TypeVar("T")


class Loads:
    """The loads that every system gets. Files are written into `folder`."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments, self._folder = arguments, folder
        self._files: dict[str, Path | None] = {CONVERSATIONS: arguments.conversations, CODE: arguments.code}
        self._seeds: dict[Cell, list[int]] = {
            (trace, rate): arguments.seeds[:seeds]
            for trace in arguments.traces
            for rate, seeds in arguments.rates[trace]
        }

    def lines(self, trace: str, count: int, seed: int) -> list[TraceLine]:
        return traffic(trace, self._files, count, seed, self._arguments.longest)

    def all(self) -> Iterator[tuple[Cell, int, list[TraceLine]]]:
        """(load, seed, requests)"""
        for (trace, rate), seeds in self._seeds.items():
            count = self._arguments.requests or max(2, round(rate * self._arguments.seconds))
            for seed in seeds:
                yield (trace, rate), seed, self.lines(trace, count, seed)

    def warm_up(self) -> Iterator[tuple[Cell, list[TraceLine]]]:
        """Each trace at its highest rate."""
        for trace in dict.fromkeys(trace for trace, _ in self._seeds):
            rate = max(rate for of, rate in self._seeds if of == trace)
            yield (trace, rate), self.lines(trace, max(2, self._arguments.warm_up), 0)

    async def sent(self, port: int, cell: Cell, text: str, lines: list[TraceLine]) -> list[Timing]:
        """`text`: another one gives other prompts of the same lengths. Raises UnavailableError when all fail."""
        path = write_trace(self._folder / "load.jsonl", lines)
        amount = Amount(len(lines), (1, 1), (1, 1), seed=zlib.crc32(text.encode()))
        sweep = Sweep(amount, rates=[cell[1]], trace=path)
        wishes = Wishes(NAME, False, TEMPERATURE, True, self._arguments.timeout_s)
        _, [(_, timings)] = await sweep.timed(
            Endpoint(f"http://127.0.0.1:{port}", None, None), wishes, lambda *_: lambda: None
        )
        return timings


def main() -> None:
    arguments = parsed(__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server outlives us
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            loads = Loads(arguments, Path(scratch))
            document = merged(arguments.merge) if arguments.merge else _measured(arguments, loads)
            if arguments.advise:
                document.expectations = _expectations(document, arguments, loads)
    except BatonError as error:
        sys.exit(f"error: {error}")
    write_result(arguments.out / "runs.json", msgspec.to_builtins(document))
    comparison = Comparison(document.runs, document.expectations)
    show(comparison, Console(width=None if sys.stdout.isatty() else 200))
    for system, problem in document.problems.items():
        print(f"{system} was not measured to the end: {problem}")
    sys.exit(1 if comparison.missed() or document.problems else 0)


def _measured(arguments: argparse.Namespace, loads: Loads) -> Document:
    """Raises ConfigError, UnavailableError."""
    systems = [parse_system(text, arguments.gpus) for text in arguments.systems]
    planned = list(loads.all())
    model = _model_folder(arguments)
    machine = _apart(describe, arguments.commit)
    settings = {key: str(value) for key, value in vars(arguments).items()}
    document = Document(machine, [machine["command"]], settings, arguments.gpus)
    for system in systems:
        try:
            _measure(system, model, planned, document, arguments, loads)
        except UnavailableError as error:
            document.problems[system.name] = str(error)
            print(f"{system.name}: {error}", file=sys.stderr, flush=True)
    return document


def _measure(
    system: System,
    model: str,
    planned: Sequence[tuple[Cell, int, list[TraceLine]]],
    document: Document,
    arguments: argparse.Namespace,
    loads: Loads,
) -> None:
    """Starts a system and gives it all loads. Raises UnavailableError when it does not start, or answers nothing."""
    logs = arguments.out / "logs" / system.name.replace(":", "-")
    logs.mkdir(parents=True, exist_ok=True)
    port = free_port("127.0.0.1")
    command = system.command(model, port, logs, arguments.vllm, arguments.config)
    with running(command, port, logs / "server.log", arguments.ready_s) as ready_s:
        document.ready_s[system.name] = round(ready_s, 1)
        print(f"{system.name}: ready after {ready_s:.0f} s", flush=True)
        if system.is_vllm:
            document.versions["vllm"] = _version(port)
        for cell, lines in loads.warm_up():
            asyncio.run(loads.sent(port, cell, "warm-up", lines))
        for cell, seed, lines in planned:
            document.runs.append(_run(system, port, loads, cell, seed, lines))
            write_result(arguments.out / "runs.json", msgspec.to_builtins(document))


def _run(system: System, port: int, loads: Loads, cell: Cell, seed: int, lines: list[TraceLine]) -> Run:
    text = f"{cell[0]} {cell[1]:g} {seed}"
    began_s = time.monotonic()
    try:
        timings = asyncio.run(loads.sent(port, cell, text, lines))
    except UnavailableError as error:
        raise UnavailableError(f"{system.name}, {text}: {error}") from error
    run = summed_up(system.name, cell, seed, lines, timings)
    shown = ", ".join(f"{name} {value:,.1f}" for name, value in run.figures.items())
    print(f"{system.name}, {text}: {time.monotonic() - began_s:.0f} s, {run.wrong} wrong; {shown}", flush=True)
    return run


def _model_folder(arguments: argparse.Namespace) -> str:
    """Writes a shape's folder where it is not there yet, once for all parts. Raises ConfigError."""
    if arguments.model not in (*SHAPES, TINY):
        return str(arguments.model)
    folder = Path(tempfile.gettempdir()) / f"baton-{arguments.model}"
    if not folder.exists():
        tokenizer = None
        if arguments.model != TINY:
            tokenizer = arguments.tokenizer or resolve_model(SMOLLM2, progress=True).folder
        partial = Path(tempfile.mkdtemp(prefix="baton-model-"))
        _apart(write_model, partial, arguments.model, tokenizer).rename(folder)
    return str(folder)


def _apart(call: Callable[..., T], *arguments: Any) -> T:
    """Calls it in a process of its own, because CUDA would keep memory here that the systems shall have."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


def _expectations(document: Document, arguments: argparse.Namespace, loads: Loads) -> list[Expectation]:
    """Raises ConfigError."""
    from benchmarks.whole.expected import Advisor

    advisor = Advisor(arguments.profile or arguments.config, arguments.kv_tokens)
    found = []
    for run in document.runs:
        system = parse_system(run.system, document.gpus)
        if not system.is_vllm:
            lines = loads.lines(run.trace, run.requests, run.seed)
            figures = advisor.expected(system, run.cell, lines)
            found.append(Expectation(run.system, run.trace, run.rate, run.seed, figures))
    return found


def _version(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/version", timeout=10) as answer:
        return str(json.load(answer)["version"])


if __name__ == "__main__":
    main()
