"""Cost of KV pushes for a prefill worker: its engine and sender and a real receiver, without the rest of the service.

    python benchmarks/push_slowdown.py [--model 8b] [--prompts 1024,8192,32768] [--out FOLDER]     (two GPUs)
    python benchmarks/push_slowdown.py --model tiny --prompts 256                         (on a CPU: does it run)

`nothing`: no KV is pushed. `at once`: the layers of a chunk leave together after the last one, as over `cuda_ipc`.
`layers`: each layer leaves when it is computed. `alone ms`: one prompt at a time, from its arrival to the decode side's
commit. `busy ms`: time per prompt while other prompts always wait. `MHz`: the GPU's clock meanwhile.
"""

import argparse
import multiprocessing
import os
import queue
import random
import statistics
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baton_proto.sampling import SamplingParams
from benchmarks.machine import describe, write_result
from benchmarks.shapes import PLAIN, SHAPES
from engine.blocks.block_manager import BlockManager
from engine.core.engine import Engine
from engine.loading.loaded_model import LoadedModel, load_model
from engine.sequences.sequence import Sequence
from kvtransfer.decode_side.receiver import Receiver
from kvtransfer.prefill_side.sender import Sender
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from kvtransfer.transports.shm import ShmWriter
from kvtransfer.wire.identity import SlabIdentity
from prefill_worker.push_plan import PushPlan
from prefill_worker.shipping import Shipping, ShippingJob
from runtime.checkpoint.model_files import ModelFiles, resolve_model
from runtime.config.serving import EngineConfig, TransferConfig
from tests.tiny_model import write_tiny_model

WAYS = ("nothing", "at once", "layers")
AHEAD = 3  # prompts that wait while another one is computed
TTL_S = 60.0


def decode(pipe: Connection, gpu: str) -> None:
    """Grants the next blocks for each request, until a request asks for none."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    import torch

    from runtime.device.drivers import memory_of

    layout: SlabLayout = pipe.recv()
    slab = Slab(layout, memory_of(torch.device("cuda" if gpu else "cpu")))
    receiver = Receiver(slab, SlabIdentity("decode", 1, "model", layout), TransferConfig(), "127.0.0.1", lambda _: None)
    begin = 0
    while count := pipe.recv():
        begin = 0 if begin + count > layout.num_blocks else begin
        pipe.send(receiver.reserve(list(range(begin, begin + count)), 0, TTL_S))
        begin += count
    receiver.close()


def _writer(model: LoadedModel) -> Any:
    if model.slab.driver.kind == "host":
        return ShmWriter
    from kvtransfer.transports.cuda_ipc import CudaIpcWriter  # here, because it needs a GPU's packages

    return CudaIpcWriter


class Prefill:
    """A prefill worker's engine thread."""

    def __init__(self, model: LoadedModel, config: EngineConfig, pipe: Connection, way: str) -> None:
        self._layout, self._pipe = model.slab.layout, pipe
        self._engine = Engine(
            model.runner,
            BlockManager(self._layout.num_blocks, self._layout.block_size),
            max_batch_tokens=config.max_batch_tokens,
            max_running=16,
            eos_token_ids=frozenset(),
        )
        self._random = random.Random(0)
        self._sender = Sender(model.slab, SlabIdentity("prefill", 1, "model", self._layout), TransferConfig())
        self._done: queue.Queue[ShippingJob] = queue.Queue()
        self._shipping: Shipping | None = None
        if way != "nothing":
            _writer(model).at_once = way == "at once"
            self._shipping = Shipping(self._engine, self._sender, self._push_done)
        self._number = 0
        self._open = 0  # pushes that are not done

    def _push_done(self, job: ShippingJob, result: Any) -> None:
        assert result.ok, result
        self._done.put(job)

    def add(self, num_tokens: int) -> None:
        self._number += 1
        tokens = [self._random.randrange(3, 500) for _ in range(num_tokens)]
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        ships = self._shipping is not None
        sequence = Sequence(f"{self._number}", tokens, num_tokens, sampling, prefill_only=True, pinned=ships)
        if self._shipping is None:
            self._engine.add(sequence)
            return
        self._open += 1
        self._pipe.send(-(-num_tokens // self._layout.block_size))
        grant = self._pipe.recv()
        self._shipping.add(ShippingJob(sequence, PushPlan(num_tokens, 0, self._layout.block_size)), grant)

    def step(self) -> int:
        """Runs one step. Returns how many prompts the step has finished."""
        output = self._engine.step()
        if self._shipping is not None:
            self._shipping.step_done(output)
            while not self._done.empty():
                self._let_go()
        return len(output.outputs)

    def until_there(self) -> None:
        """Returns when all prompts under way are computed and the decode side has committed them."""
        while self._engine.has_work:
            self.step()
        while self._open:
            self._let_go()

    def _let_go(self) -> None:
        assert self._shipping is not None
        self._shipping.close(self._done.get(timeout=TTL_S))
        self._open -= 1

    def close(self) -> None:
        self._sender.close()


def alone_s(prefill: Prefill, num_tokens: int, rounds: int) -> float:
    times = []
    for _ in range(rounds + 2):
        begin_s = time.perf_counter()
        prefill.add(num_tokens)
        prefill.until_there()
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times[2:])


def busy_s(prefill: Prefill, num_tokens: int, rounds: int) -> float:
    for _ in range(AHEAD):
        prefill.add(num_tokens)
    ended, begin_s = 0, time.perf_counter()
    while ended < rounds:
        computed = prefill.step()
        ended += computed
        for _ in range(computed):
            prefill.add(num_tokens)
    took_s = time.perf_counter() - begin_s
    prefill.until_there()
    return took_s / ended


class Clock:
    """The GPU's clock while the `with` block runs; 0 without a GPU."""

    def __init__(self, gpu: str) -> None:
        self._gpu = gpu

    def __enter__(self) -> "Clock":
        query = ["nvidia-smi", "-i", self._gpu, "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "-lms", "50"]
        self._reader = subprocess.Popen(query, stdout=subprocess.PIPE, text=True) if self._gpu else None
        return self

    def __exit__(self, *error: object) -> None:
        self.mhz = 0.0
        if self._reader is not None:
            self._reader.terminate()
            readings = [float(line) for line in self._reader.communicate()[0].splitlines() if line.strip().isdecimal()]
            self.mhz = statistics.mean(readings) if readings else 0.0


def measure(model: LoadedModel, config: EngineConfig, pipe: Connection, arguments: argparse.Namespace) -> Any:
    for num_tokens in arguments.prompts:
        rounds = max(2, arguments.tokens // num_tokens)
        for way in WAYS:
            prefill = Prefill(model, config, pipe, way)
            alone = alone_s(prefill, num_tokens, rounds)
            with Clock(arguments.gpus.split(",")[0]) as clock:
                busy = busy_s(prefill, num_tokens, rounds)
            prefill.close()
            row = {"prompt": num_tokens, "push": way, "alone ms": alone * 1e3, "busy ms": busy * 1e3, "MHz": clock.mhz}
            print(row, flush=True)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*PLAIN, "tiny"], default="8b")
    parser.add_argument(
        "--prompts", type=lambda text: [int(part) for part in text.split(",")], default=[1024, 8192, 32768]
    )
    parser.add_argument("--tokens", type=int, default=80_000, help="of each line")
    parser.add_argument("--max-batch-tokens", type=int, default=8192)
    parser.add_argument("--gpus", default="0,1", help="of the prefill and of the decode side")
    parser.add_argument("--out", type=Path, help="folder for the result")
    arguments = parser.parse_args()
    if arguments.model == "tiny":
        arguments.gpus, arguments.tokens = ",", min(arguments.tokens, 2000)
    ours, theirs = arguments.gpus.split(",")
    spawn = multiprocessing.get_context("spawn")
    pipe, far_end = spawn.Pipe()
    child = spawn.Process(target=decode, args=(far_end, theirs), daemon=True)
    child.start()
    os.environ["CUDA_VISIBLE_DEVICES"] = ours
    with tempfile.TemporaryDirectory() as folder:
        model, config = _load(arguments, Path(folder))
        pipe.send(model.slab.layout)
        rows = list(measure(model, config, pipe, arguments))
        pipe.send(0)
        child.join(10)
        model.close()
    table = Table(title="push_slowdown")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{value:,.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    if arguments.out is not None:
        write_result(arguments.out / f"push-slowdown-{arguments.model}.json", {"rows": rows, **describe()})


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _load(arguments: argparse.Namespace, folder: Path) -> tuple[LoadedModel, EngineConfig]:
    longest = max(arguments.prompts) + 8
    if arguments.model == "tiny":
        config = EngineConfig(device="cpu", kv_memory="64MiB", max_model_len=longest)
        return load_model(resolve_model(str(write_tiny_model(folder))), config), config
    files = ModelFiles(Path(), arguments.model, SHAPES[arguments.model], frozenset())
    config = EngineConfig(
        device="cuda",
        dtype="bfloat16",
        attention="triton",
        block_size=64,
        max_model_len=longest,
        max_batch_tokens=arguments.max_batch_tokens,
        kv_memory="32GiB",
    )
    return load_model(files, config, random_weights=True), config


if __name__ == "__main__":
    main()
