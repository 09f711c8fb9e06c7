"""How long a step of the engine takes: prompts of n tokens beside B readers, on one GPU with random weights.

    python -m benchmarks.step_cost --model 8b
    TRITON_INTERPRET=1 python -m benchmarks.step_cost --model tiny    (on a CPU, in Triton's interpreter: no figures)

Each point of the grid runs with CUDA graphs of more than 512 tokens, and without (`graphs`). One step is submitted
while the one before runs, as the engine does. The coefficients of
max(floor, token * n) + pair * pairs + sequence * B + context * K are fitted to the medians. `--busy 0.3` measures
beside a thread that holds the interpreter's lock 30 % of the time, as a worker's event loop does with many readers.
"""

import argparse
import itertools
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence as Run
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from baton_proto.sampling import SamplingParams
from benchmarks.machine import describe, write_result
from benchmarks.shapes import SHAPES
from engine.cuda.cuda_build import build_cuda_runner, build_on_gpu
from engine.cuda.cuda_runner import CudaRunner
from engine.model.random_weights import RandomWeights
from engine.model.shard import Shard
from engine.sequences.batch import Batch, ScheduledSequence
from engine.sequences.sequence import Sequence
from runtime.checkpoint.model_config import ModelConfig
from runtime.checkpoint.rope_config import Rope
from runtime.config.step_times import token_pairs
from runtime.device.drivers import memory_of

PROMPTS, STARTS = (0, 64, 256, 512, 1024, 2048, 4096), (0, 8192)
READERS, CONTEXTS = (0, 8, 16, 32), (4096, 9216)
SMALL_GRAPHS = 512  # tokens; the largest graph of an 8B model without larger ones
WARM = 4  # steps of a point that compile and load
BURST_S = 0.001  # that a busy thread holds the interpreter's lock
TINY_KV_BYTES = 1 << 20  # all memory of a GPU would be millions of blocks
TINY = replace(
    SHAPES["0.6b"], vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=16, max_position=256, dtype="float32", rope=Rope(1e6, 16),
)  # fmt: skip


class Point(NamedTuple):
    prompt: int  # tokens of a chunk
    start: int  # tokens of its sequence before it
    readers: int
    context: int  # tokens of each reader

    @property
    def pairs(self) -> float:
        return token_pairs(self.start, self.prompt)


class Cost(msgspec.Struct, frozen=True):
    p50_ms: float
    p90_ms: float
    host_ms: float  # median of submitting


class Coefficients(msgspec.Struct, frozen=True):
    """Of max(floor, token * n) + pair * pairs + sequence * B + context * K, in ms; and the median relative error."""

    floor: float
    token: float
    pair: float
    sequence: float
    context: float
    error: float


def grid(
    prompts: Run[int] = PROMPTS, starts: Run[int] = STARTS, readers: Run[int] = READERS, contexts: Run[int] = CONTEXTS
) -> list[Point]:
    points = itertools.product(prompts, starts, readers, contexts)
    whole = (Point(n, start if n else 0, count, context if count else 0) for n, start, count, context in points)
    return [point for point in dict.fromkeys(whole) if point.prompt or point.readers]


def variants(point: Point, largest: int) -> list[bool]:
    """With larger graphs and without, where that makes a difference. largest: tokens of the largest graph."""
    is_larger = point.prompt and SMALL_GRAPHS < point.prompt + point.readers <= largest
    return [True, False] if is_larger else [False]


class Steps:
    def __init__(self, runner: CudaRunner, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self.runner = runner
        self._blocks = random.Random(1).sample(range(num_blocks), num_blocks)
        self._block_size = block_size
        self._tokens = random.Random(2).choices(range(vocab_size), k=max(PROMPTS) + max(STARTS) + max(CONTEXTS))
        graphs = runner._prompt_graphs
        assert graphs is not None, "capture has run"
        self._graphs, self.sizes = graphs, graphs.sizes

    def has_room(self, point: Point) -> bool:
        sequences = [point.start + point.prompt, *[point.context] * point.readers]
        return sum(-(-tokens // self._block_size) for tokens in sequences) <= len(self._blocks)

    def measure(self, point: Point, graphs: bool, count: int) -> Cost:
        """Times `count` steps with the same work."""
        batch, runner = self._batch(point), self.runner
        times, hosts = list[float](), list[float]()
        with self._switched(graphs):
            step = runner.submit(batch)
            step.draw()
            for _ in range(WARM + count):
                began_s = time.perf_counter()
                following = runner.submit(batch)
                hosts.append(time.perf_counter() - began_s)
                step.tokens()
                following.draw()
                times.append(time.perf_counter() - began_s)
                step = following
            step.tokens()
        p50, p90 = np.percentile(np.array(times[WARM:]) * 1e3, [50, 90])
        return Cost(float(p50), float(p90), statistics.median(hosts[WARM:]) * 1e3)

    def _batch(self, point: Point) -> Batch:
        blocks = iter(self._blocks)

        def scheduled(start: int, count: int) -> ScheduledSequence:
            sequence = Sequence("", self._tokens, start + count, SamplingParams(max_tokens=1, temperature=0.0))
            sequence.block_table = list(itertools.islice(blocks, -(-(start + count) // self._block_size)))
            return ScheduledSequence(sequence, start, count, sample=True)

        prefill = [scheduled(point.start, point.prompt)] if point.prompt else []
        return Batch(prefill, [scheduled(point.context - 1, 1) for _ in range(point.readers)])

    @contextmanager
    def _switched(self, graphs: bool) -> Iterator[None]:
        if not graphs:
            self._graphs.sizes = [size for size in self.sizes if size <= SMALL_GRAPHS]
        try:
            yield
        finally:
            self._graphs.sizes = self.sizes


def fitted(points: list[Point], ms: list[float]) -> Coefficients:
    """Least squares of the relative error. Up to some number of tokens the floor counts; each number is tried."""
    table = np.array([[point.prompt, point.pairs, point.readers, point.readers * point.context] for point in points])
    y, best, least = np.array(ms), np.zeros(5), np.inf
    for cut in np.unique(table[:, 0]):
        short = table[:, 0] <= cut
        columns = np.column_stack((short, np.where(short, 0, table[:, 0]), table[:, 1:])) / y[:, None]
        found = np.linalg.lstsq(columns, np.ones(len(y)), rcond=None)[0]
        squares = float(((_expected(table, found) / y - 1) ** 2).sum())
        if squares < least:
            best, least = found, squares
    error = float(np.median(np.abs(_expected(table, best) / y - 1)))
    return Coefficients(*(float(value) for value in best), error=error)


def _expected(table: np.ndarray, found: np.ndarray) -> np.ndarray:
    straight: np.ndarray = np.maximum(found[0], found[1] * table[:, 0]) + table[:, 1:] @ found[2:]
    return straight


@contextmanager
def busy(share: float) -> Iterator[None]:
    """Another thread holds the interpreter's lock for a share of the time."""
    ended = threading.Event()

    def spin() -> None:
        while not ended.wait(BURST_S * (1 - share) / share):
            until_s = time.perf_counter() + BURST_S
            while time.perf_counter() < until_s:
                pass

    thread = threading.Thread(target=spin, name="busy")
    if share:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if share:
            thread.join()


def build(model: str, max_tokens: int, max_running: int) -> tuple[Steps, dict[str, float]]:
    """The steps, and what the start took: seconds and bytes of the whole and of the graphs."""
    config = TINY if model == "tiny" else SHAPES[model]
    began_s = time.perf_counter()
    if not torch.cuda.is_available():
        return _build_on_cpu(config, max_tokens, max_running), {"ready_s": time.perf_counter() - began_s}
    device = torch.device("cuda", 0)
    gpu = build_on_gpu(
        config,
        RandomWeights(Shard(config, 0, 1), torch.bfloat16, memory_of(device)),
        frozenset(),
        kv_dtype="bfloat16",
        block_size=64,
        kv_bytes=TINY_KV_BYTES if model == "tiny" else None,
        max_batch_tokens=max_tokens,
        max_running=max_running,
        max_model_len=config.max_position,
        flash=False,
        graphs=False,
    )
    torch.cuda.synchronize()
    captured_s, (free, _) = time.perf_counter(), torch.cuda.mem_get_info()
    gpu.runner.capture()
    torch.cuda.synchronize()
    took = {
        "ready_s": time.perf_counter() - began_s,
        "graphs_s": time.perf_counter() - captured_s,
        "graphs_mib": (free - torch.cuda.mem_get_info()[0]) / 2**20,
        "kv_blocks": float(gpu.slab.layout.num_blocks),
    }
    return Steps(gpu.runner, gpu.slab.layout.num_blocks, 64, config.vocab_size), took


def _build_on_cpu(config: ModelConfig, max_tokens: int, max_running: int) -> Steps:
    device, num_blocks = torch.device("cpu"), 64
    runner = build_cuda_runner(
        config,
        RandomWeights(Shard(config, 0, 1), torch.float32, memory_of(device)),
        torch.zeros(config.num_layers, num_blocks, config.num_kv_heads, 2, 16, config.head_dim),
        frozenset(),
        max_batch_tokens=max_tokens,
        max_running=max_running,
        max_model_len=config.max_position,
        flash=False,
    )
    runner.capture()
    return Steps(runner, num_blocks, 16, config.vocab_size)


def measure_all(steps: Steps, points: list[Point], count: int) -> dict[bool, dict[Point, Cost]]:
    """Each variant's costs; a point that a switch does not concern is the same in both."""
    found: dict[bool, dict[Point, Cost]] = {True: {}, False: {}}
    _print_line("n", "start", "B", "context", "graphs", "p50 ms", "p90 ms", "host ms")
    for point in points:
        if not steps.has_room(point):
            print(f"{point}: the KV memory has no room")
            continue
        costs = {graphs: steps.measure(point, graphs, count) for graphs in variants(point, steps.sizes[-1])}
        for graphs, cost in costs.items():
            times = [f"{ms:.2f}" for ms in (cost.p50_ms, cost.p90_ms, cost.host_ms)]
            _print_line(*point, _shown(graphs), *times)
        for graphs, known in found.items():
            known[point] = costs.get(graphs, costs[False])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["8b", "0.6b", "tiny"], default="8b")
    parser.add_argument("--steps", type=int, default=25, help="of each point, after those that warm it up")
    parser.add_argument("--max-batch-tokens", type=int, default=8192)
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--busy", type=float, default=0.0, help="share of the time that another thread is busy")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    points, tokens, running = grid(), arguments.max_batch_tokens, arguments.max_running
    if arguments.model == "tiny":
        points, tokens, running = grid((0, 24), (0, 16), (0, 3), (20, 40)), 64, 4
    steps, start = build(arguments.model, tokens, running)
    print(f"{len(steps.sizes)} sizes of graphs up to {steps.sizes[-1]} tokens; the start took {start}", flush=True)
    with busy(arguments.busy):
        found = measure_all(steps, points, arguments.steps)
    fits = {graphs: fitted(list(costs), [cost.p50_ms for cost in costs.values()]) for graphs, costs in found.items()}
    print()
    _print_line("graphs", *Coefficients.__struct_fields__)
    for graphs, fit in fits.items():
        _print_line(_shown(graphs), *(f"{value:.3g}" for value in msgspec.structs.astuple(fit)))
    if arguments.model != "tiny":
        suffix = f"-busy{arguments.busy:g}" if arguments.busy else ""
        document = {"machine": describe(), "sizes": steps.sizes, "start": start, "variants": _documents(found, fits)}
        write_result(arguments.out / f"step-cost-{arguments.model}{suffix}.json", document)


def _documents(found: dict[bool, dict[Point, Cost]], fits: dict[bool, Coefficients]) -> list[dict[str, Any]]:
    def of(graphs: bool) -> dict[str, Any]:
        points = [point._asdict() | msgspec.to_builtins(cost) for point, cost in found[graphs].items()]
        return {"graphs": graphs, "fit": msgspec.to_builtins(fits[graphs]), "points": points}

    return [of(graphs) for graphs in found]


def _shown(switch: bool) -> str:
    return "yes" if switch else "no"


def _print_line(*cells: object) -> None:
    print(" ".join(f"{cell!s:>9}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
