"""What the host and disk tiers of a GPU worker cost and bring, with random weights on one GPU.

    python -m benchmarks.host_tier --model 8b [--json FILE] [--disk FOLDER]

Rows: the link (copies of 512 blocks in runs of 64 and 256 KiB), decodes beside offloading, a long prefix computed,
restored from host memory and from the disk, and the longest gap between tokens of others while a prefix is restored.
`--vllm PYTHON`: beside it vLLM's own offloading to host memory (vllm_offloading.py), with the same blocks.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch

from baton_proto.discovery import TimedStep
from baton_proto.sampling import SamplingParams
from benchmarks.disk_restart import plain_s
from benchmarks.machine import describe, write_result
from benchmarks.random_model import write_config
from benchmarks.shapes import PLAIN, SHAPES
from engine.blocks.block_manager import BlockManager
from engine.core.engine import Engine
from engine.cuda.cuda_build import GpuEngine, build_on_gpu
from engine.model.random_weights import RandomWeights
from engine.model.shard import Shard
from engine.runners.auto import flash_is_available
from engine.sequences.sequence import Sequence
from engine.tiers.block_files import BlockFiles
from engine.tiers.disk_kv import READERS, DiskKv
from engine.tiers.gpu_kv import GpuHostKv, GpuMove
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from runtime.config.step_fit import RECENT
from runtime.config.step_times import token_pairs
from runtime.device.drivers import memory_of
from runtime.device.pinned_memory import PinnedMemory

BLOCK_SIZE = 64
PREFIX = 32768
NUM_BLOCKS = 1400  # two prefixes, and a part of a third
DEVICE = torch.device("cuda", 0)


def link() -> list[dict[str, Any]]:
    rows = []
    for block_size in (16, 64):  # of 8 heads: 64 and 256 KiB
        layout = SlabLayout(36, 4096 // block_size * 16, 8, block_size, 128, "bfloat16")
        slab = Slab(layout, memory_of(DEVICE))
        count = 512 * 64 // block_size // 2
        tier = GpuHostKv(slab, 2 * count * layout.num_layers * layout.block_bytes)
        rng = np.random.default_rng(0)
        blocks = rng.permutation(layout.num_blocks)[:count].tolist()
        slots = rng.permutation(tier.num_slots)[:count].tolist()
        unused = sorted(set(range(layout.num_blocks)) - set(blocks))[:count]
        others = sorted(set(range(tier.num_slots)) - set(slots))[:count]
        nbytes = count * tier.slot_bytes

        def timed(*calls: Any) -> tuple[float, float]:
            best, host = float("inf"), float("inf")
            for _ in range(3):
                torch.cuda.synchronize()
                began = time.perf_counter()
                moves = [call() for call in calls]
                for move in moves:
                    move.enqueued.result()
                host = min(host, time.perf_counter() - began)
                for move in moves:
                    move.wait()
                best = min(best, time.perf_counter() - began)
            return best, host

        def down(tier: GpuHostKv = tier, blocks: list[int] = blocks, slots: list[int] = slots) -> GpuMove:
            return tier.store(blocks, slots)

        def up(tier: GpuHostKv = tier, blocks: list[int] = unused, slots: list[int] = others) -> GpuMove:
            return tier.load(slots, blocks)

        row: dict[str, Any] = {"run KiB": layout.block_bytes >> 10, "GB": nbytes / 1e9}
        for name, calls in (("d2h", (down,)), ("h2d", (up,)), ("both", (down, up))):
            took, host = timed(*calls)
            row[f"{name} GB/s"] = len(calls) * nbytes / took / 1e9
            row[f"{name} enqueued ms"] = host * 1e3
        rows.append(row)
        tier.close()
        slab.close()
    return rows


class Server:
    """An engine on the shared runner, with or without tiers."""

    def __init__(
        self, gpu: GpuEngine, budget: int, rows: int, host: GpuHostKv | None, disk: DiskKv | None = None
    ) -> None:
        layout = gpu.slab.layout
        self.manager = BlockManager(layout.num_blocks, layout.block_size, host, disk)
        self.news = Event()
        self.manager.tiers.on_copied(self.news.set)
        self.engine = Engine(
            gpu.runner, self.manager, max_batch_tokens=budget, max_running=rows, eos_token_ids=frozenset()
        )

    def add(self, name: str, tokens: list[int], max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.6, ignore_eos=True)
        self.engine.add(Sequence(name, tokens, len(tokens), sampling))

    def first_token_s(self, name: str, tokens: list[int]) -> float:
        began = time.perf_counter()
        self.add(name, tokens, 1)
        while True:
            self.news.clear()
            output = self.engine.step()
            for one in output.outputs:
                assert one.error is None, one.error
                if one.sequence.request_id == name:
                    return time.perf_counter() - began
            if not output.is_news:
                self.news.wait(0.01)

    def decode(self, steps: int) -> list[float]:
        """Seconds of each step."""
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            for one in self.engine.step().outputs:
                assert one.error is None, one.error
            times.append(time.perf_counter() - began)
        return times

    def drop_all(self) -> None:
        for sequence in list(self.engine._sequences):
            self.engine.abort(sequence)
        while self.engine.has_work:
            self.engine.step()


def prompt(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(1000, 100_000, count).tolist()


def offloading(gpu: GpuEngine, host: GpuHostKv, rows: int = 256, steps: int = 300) -> dict[str, Any]:
    """Decodes in a pool that is full of cached prefixes, so that each new block pushes one out. The two take turns."""
    times: dict[str, list[float]] = {"forgotten": [], "offloaded": []}
    moved = 0
    for turn in range(12):
        name = ("forgotten", "offloaded")[turn % 2]
        server = Server(gpu, 8192, rows, host if name == "offloaded" else None)
        pool = gpu.slab.layout.num_blocks * BLOCK_SIZE
        filling, seed = 0, 0
        while filling < pool + 8192:
            server.first_token_s(f"fill {seed}", prompt(1000 + seed, 8192))
            filling, seed = filling + 8192, seed + 1
        for row in range(rows):
            server.add(f"row {row}", prompt(5000 + row, 64), 100_000)
        while server.engine.load().queued_prefill_tokens:
            server.engine.step()
        server.decode(50)
        before = server.manager.tiers.num_moved_down
        began = time.perf_counter()
        server.decode(steps)
        torch.cuda.synchronize()
        times[name].append((time.perf_counter() - began) / steps)
        moved = max(moved, server.manager.tiers.num_moved_down - before)
        server.drop_all()
        server.manager.clear()
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "rows": rows,
        "step ms, forgotten": medians["forgotten"] * 1e3,
        "step ms, offloaded": medians["offloaded"] * 1e3,
        "all": times,
        "slower": medians["offloaded"] / medians["forgotten"] - 1,
        "blocks offloaded per step": moved / steps,
    }


def restoring(gpu: GpuEngine, host: GpuHostKv, folder: Path | None) -> dict[str, Any]:
    """A prefix of 32k tokens, whose pool is full of others when it is asked for again."""
    server = Server(gpu, 8192, 8, host)
    tokens = prompt(1, PREFIX)
    server.first_token_s("warm", prompt(2, PREFIX))
    result: dict[str, Any] = {"prefix": PREFIX}
    computed = [server.first_token_s("cold", tokens)]
    server.first_token_s("cold 2", prompt(3, PREFIX))
    computed.append(server.first_token_s("cold 3", prompt(4, PREFIX)))
    result["computed s"] = min(computed)
    result["device s"] = min(server.first_token_s(f"device {i}", prompt(4, PREFIX)) for i in range(3))
    restored = []
    for i in range(4):
        raised = server.manager.tiers.num_raised
        restored.append(server.first_token_s(f"host {i}", prompt(1 + (0, 2)[i % 2], PREFIX)[:PREFIX]))
        result["blocks raised"] = server.manager.tiers.num_raised - raised
        server.first_token_s(f"between {i}", prompt(10 + i, PREFIX))
        server.first_token_s(f"between too {i}", prompt(20 + i, PREFIX))
    result["host s"] = statistics.median(restored)
    result["host, all"] = restored
    result["host / computed"] = result["host s"] / result["computed s"]
    server.manager.vacate()
    torch.cuda.synchronize()
    result["host, empty pool s"] = server.first_token_s("empty", prompt(13, PREFIX))
    # A prefix is restored beside readers, who wait no longer than for one on the device.
    for row in range(6):
        server.add(f"reader {row}", prompt(500 + row, 256), 100_000)
    while server.engine.load().queued_prefill_tokens:
        server.engine.step()
    server.decode(100)
    quiet = server.decode(200)
    gaps: dict[str, list[float]] = {}
    for name, seed in (("device", 13), ("host", 23)):
        server.add(name, [*prompt(seed, PREFIX)], 1)
        raised = server.manager.tiers.num_raised
        gaps[name] = sorted(server.decode(60))[:-4:-1]
        result[f"raised beside readers, {name}"] = server.manager.tiers.num_raised - raised
    result |= {"quiet step ms": statistics.median(quiet) * 1e3}
    result |= {f"longest step ms, {name}": longest[0] * 1e3 for name, longest in gaps.items()}
    result |= {f"longest three, {name}": longest for name, longest in gaps.items()}
    server.drop_all()
    server.manager.clear()
    if folder is not None:
        result |= from_disk(gpu, host, folder, result["computed s"])
    return result


def from_disk(gpu: GpuEngine, host: GpuHostKv, folder: Path, computed_s: float) -> dict[str, Any]:
    layout = gpu.slab.layout
    files = BlockFiles(folder / "host-tier", 24 << 30, host.slot_bytes, layout.block_size)
    disk = DiskKv(host, files)
    server = Server(gpu, 8192, 8, host, disk)
    for at_s in range(1, RECENT + 1):
        computed = TimedStep(PREFIX, token_pairs(0, PREFIX), 0, 0, computed_s * 1e3)
        server.engine.timed_steps.add(computed, float(at_s))
    server.first_token_s("first", prompt(1, PREFIX))
    seed = 100
    began = time.perf_counter()
    cache = server.manager.cache
    while cache.content(cache.table.block_of[first_hash(prompt(1, PREFIX))]) is not None:
        server.first_token_s(f"push {seed}", prompt(seed, PREFIX))
        seed += 1
        limit = time.perf_counter() + 5
        while cache.copies.writes and time.perf_counter() < limit:
            server.engine.step()
            time.sleep(0.01)
        if time.perf_counter() - began > 60:
            return {"disk": f"not on the disk after {seed - 100} prompts"}
    count = min(PREFIX // BLOCK_SIZE - 1, (files.folder / "blocks").stat().st_size // host.slot_bytes)
    spare = PinnedMemory(gpu.slab.driver, count * host.slot_bytes)
    targets = [spare.array[i * host.slot_bytes : (i + 1) * host.slot_bytes].data for i in range(count)]
    drop_page_cache(folder / "host-tier")
    plain = plain_s(files.folder / "blocks", targets, READERS)
    del targets
    spare.close()
    drop_page_cache(folder / "host-tier")
    before = server.manager.tiers.num_read
    took = server.first_token_s("from disk", prompt(1, PREFIX))
    read = server.manager.tiers.num_read - before
    server.drop_all()
    disk.close()
    return {
        "disk s": took,
        "blocks read": read,
        "of blocks": count,
        "disk / computed": took / computed_s,
        "readers": READERS,
        "read plainly s": plain,
        "read plainly GB/s": count * host.slot_bytes / plain / 1e9,
    }


def first_hash(tokens: list[int]) -> int:
    sequence = Sequence("asks", tokens, len(tokens), SamplingParams(max_tokens=1, seed=1))
    sequence.hash_blocks(1, BLOCK_SIZE)
    return sequence.sequence_hashes[0]


def vllm_offloading(python: str, model: str, restored: dict[str, Any], host_gib: float) -> dict[str, Any]:
    """vLLM's times, and ours as shares of them."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), model)
        command = [python, "-m", "benchmarks.vllm_offloading", folder, str(PREFIX), str(NUM_BLOCKS), str(host_gib)]
        ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    peer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return peer | {f"ours / vLLM, {name}": restored[name] / peer[name] for name in ("computed s", "device s", "host s")}


def drop_page_cache(folder: Path) -> None:
    """The page cache gives up what it can of the files."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=PLAIN, default="8b")
    parser.add_argument("--disk", type=Path, help="a folder for the disk tier; without it that is left out")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM, to measure beside")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    document: dict[str, Any] = {"machine": describe(), "model": arguments.model}

    def show(name: str, value: Any) -> None:
        document[name] = value
        for row in value if isinstance(value, list) else [value]:
            print(
                name,
                {key: round(item, 4) if isinstance(item, float) else item for key, item in row.items()},
                flush=True,
            )
        if arguments.json:
            write_result(arguments.json, document)

    show("link", link())
    shape = SHAPES[arguments.model]
    slot_bytes = shape.num_layers * shape.num_kv_heads * 2 * BLOCK_SIZE * shape.head_dim * 2
    gpu = build_on_gpu(
        shape,
        RandomWeights(Shard(shape, 0, 1), torch.bfloat16, memory_of(DEVICE)),
        frozenset(),
        kv_dtype="bfloat16",
        block_size=BLOCK_SIZE,
        kv_bytes=NUM_BLOCKS * slot_bytes,
        max_batch_tokens=8192,
        max_running=256,
        max_model_len=40960,
        flash=flash_is_available(DEVICE, torch.bfloat16),
    )
    host = GpuHostKv(gpu.slab, 3000 * slot_bytes)
    restored = restoring(gpu, host, arguments.disk)
    show("restoring", restored)
    show("offloading", offloading(gpu, host))
    if arguments.vllm:
        show("vLLM", vllm_offloading(arguments.vllm, arguments.model, restored, 3000 * slot_bytes / 2**30))


if __name__ == "__main__":
    main()
