"""Time in which a worker's memory is freed for sleep and restored, and a check that nothing stays behind.

    python benchmarks/sleep_cycle.py --model 8b [--cycles 50] [--out FOLDER]        (one GPU)

Random weights. Answers are greedy and must be equal before and after. Goals: 98 % of weights and KV are free while the
worker sleeps; falling asleep and waking each take at most the weights' bytes at 50 GB/s plus 60 ms; cycles leave device
memory, descriptors and pinned memory as they were. The driver clears freed memory before it hands it out again, which
takes a third of a second for a whole GPU; a worker that wakes at once waits for that.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from baton_proto.sampling import SamplingParams
from baton_proto.worker import TAGS
from benchmarks.machine import describe, write_result
from benchmarks.shapes import SHAPES
from engine.loading.loaded_model import LoadedModel, load_model
from runtime.checkpoint.model_files import ModelFiles
from runtime.config.serving import EngineConfig
from tests.engine.engine_runs import run, sequences, small_engine

PARAMS = [SamplingParams(max_tokens=24, temperature=0.0, seed=seed, ignore_eos=True) for seed in range(6)]
BYTES_PER_S, FIXED_S = 50e9, 0.06


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="8b")
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    config = EngineConfig(device="cuda", dtype="bfloat16", attention="triton", block_size=16, max_model_len=4096)
    files = ModelFiles(Path(), arguments.model, SHAPES[arguments.model], frozenset())
    loaded = load_model(files, config, random_weights=True)
    before = answers(files, loaded)
    loaded.memory.sleep(1)  # the first sleep takes the host memory, which is slow; the later ones have it
    loaded.memory.wake(TAGS)
    kv_bytes = loaded.slab.layout.nbytes
    rows: list[dict[str, Any]] = []
    for level, asleep_s in ((1, 0.0), (1, 1.0), (2, 1.0), (1, 1.0)):
        free = torch.cuda.mem_get_info()[0]
        slept_s = timed(lambda level=level: loaded.memory.sleep(level))
        freed = torch.cuda.mem_get_info()[0] - free
        time.sleep(asleep_s)
        woken_s = timed(lambda: loaded.memory.wake(TAGS))
        held = loaded.memory.weights_bytes + kv_bytes
        goal_s = loaded.memory.weights_bytes / BYTES_PER_S + FIXED_S
        same = answers(files, loaded) == before
        row = {
            "level": level,
            "asleep s": asleep_s,
            "held GB": held / 1e9,
            "freed": freed / held,
            "sleep s": slept_s,
            "wake s": woken_s,
        }
        rows.append(row | {"goal s": goal_s, "same answers": same})
        print(rows[-1], flush=True)
    footprint = what_is_held()
    for _ in range(arguments.cycles):
        loaded.memory.sleep(1)
        loaded.memory.wake(TAGS)
    after = what_is_held()
    print(f"{arguments.cycles} cycles: {footprint} -> {after}; same answers {answers(files, loaded) == before}")
    document = {"benchmark": "sleep_cycle", **describe(), "rows": rows, "before": footprint, "after": after}
    write_result(arguments.out / f"sleep-{arguments.model}.json", document | {"cycles": arguments.cycles})


def answers(files: ModelFiles, loaded: LoadedModel) -> dict[str, list[int]]:
    places = loaded.slab.layout.num_window_blocks
    return run(small_engine(files, loaded.runner, 256, 512, 16, num_window_blocks=places), sequences(PARAMS, seed=5))


def timed(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began_s


def what_is_held() -> dict[str, int]:
    return {
        "device MiB": (torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) >> 20,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "resident MiB": psutil.Process().memory_info().rss >> 20,
    }


if __name__ == "__main__":
    main()
