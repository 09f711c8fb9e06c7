"""Effect of long prompts on running sequences: the ITL of 64 sequences, alone and while prompts of 8k tokens arrive,
for several token budgets of a step. Random weights, one GPU.

    python benchmarks/mixed_load.py --model 0.6b [--budgets 512,1024,2048,4096]

Each prompt arrives when the one before it has ended. Prefill never pauses, which is the worst case for a budget.
"""

import argparse
import random
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baton_proto.sampling import SamplingParams
from benchmarks.machine import describe, write_result
from benchmarks.shapes import SHAPES
from engine.blocks.block_manager import BlockManager
from engine.core.engine import Engine
from engine.cuda.cuda_build import GpuEngine, build_on_gpu
from engine.model.random_weights import RandomWeights
from engine.model.shard import Shard
from engine.runners.auto import flash_is_available
from engine.sequences.sequence import Sequence
from runtime.device.drivers import memory_of

READERS, READER_PROMPT, PROMPT = 64, 1024, 8192


class Load:
    def __init__(self, gpu: GpuEngine, budget: int) -> None:
        layout = gpu.slab.layout
        self.engine = Engine(
            gpu.runner,
            BlockManager(layout.num_blocks, layout.block_size),
            max_batch_tokens=budget,
            max_running=READERS + 2,
            eos_token_ids=frozenset(),
        )
        self.random = random.Random(budget)
        self.last_s: dict[str, float] = {}
        self.gaps_s: list[float] = []
        self.prompts_done = 0

    def add(self, name: str, prompt_tokens: int, max_tokens: int) -> None:
        prompt = [self.random.randrange(10000) for _ in range(prompt_tokens)]
        sampling = SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.6, ignore_eos=True)
        self.engine.add(Sequence(name, prompt, prompt_tokens, sampling))

    def run(self, seconds: float, prompts: bool) -> dict[str, float]:
        """The gaps between consecutive tokens of one sequence, in milliseconds."""
        self.gaps_s, self.prompts_done, started_s, index = [], 0, time.perf_counter(), 0
        self.last_s.clear()
        while time.perf_counter() - started_s < seconds:
            if prompts and not self.engine.load().queued_prefill_tokens:
                index += 1
                self.add(f"prompt {prompts} {started_s} {index}", PROMPT, 1)
            outputs = self.engine.step().outputs
            now_s = time.perf_counter()
            for output in outputs:
                assert output.error is None, output.error
                name = output.sequence.request_id
                if not name.startswith("reader"):
                    self.prompts_done += 1
                    continue
                if name in self.last_s:
                    self.gaps_s.append(now_s - self.last_s[name])
                self.last_s[name] = now_s
        p50, p99 = np.percentile(np.array(self.gaps_s) * 1e3, [50, 99])
        return {"p50_ms": float(p50), "p99_ms": float(p99), "prompt_tokens_per_s": self.prompts_done * PROMPT / seconds}

    def prefill_all(self) -> None:
        while self.engine.load().queued_prefill_tokens:
            self.engine.step()
        self.engine.step()  # because the last chunk may still be on its way

    def measure(self, seconds: float) -> dict[str, Any]:
        for index in range(READERS):
            self.add(f"reader {index}", READER_PROMPT, 30000)
        self.prefill_all()
        self.run(0.5, prompts=True)  # compiles the kernels that are new
        self.prefill_all()  # else the end of the last prompt would fall into the quiet time
        quiet = self.run(seconds, prompts=False)
        loaded = self.run(seconds, prompts=True)
        for index in range(READERS):
            self.engine.abort(f"reader {index}")
        while self.engine.has_work:
            self.engine.step()
        return {"quiet": quiet, "loaded": loaded, "p99_ratio": loaded["p99_ms"] / quiet["p99_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="0.6b")
    parser.add_argument("--budgets", default="512,1024,2048,4096")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each of the two loads")
    parser.add_argument("--block-size", type=int, default=64, choices=[16, 32, 64, 128])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    budgets = [int(budget) for budget in arguments.budgets.split(",")]
    device = torch.device("cuda", 0)
    gpu = build_on_gpu(
        SHAPES[arguments.model],
        RandomWeights(Shard(SHAPES[arguments.model], 0, 1), torch.bfloat16, memory_of(device)),
        frozenset(),
        dtype="bfloat16",
        block_size=arguments.block_size,
        kv_bytes=None,
        max_batch_tokens=max(budgets),
        max_running=READERS + 2,
        max_model_len=40960,
        flash=flash_is_available(device, torch.bfloat16),
    )
    results: dict[str, Any] = {}
    for budget in budgets:
        try:
            results[str(budget)] = Load(gpu, budget).measure(arguments.seconds)
            print(budget, results[str(budget)], flush=True)
        except Exception as error:
            traceback.print_exc()
            results[str(budget)] = {"error": str(error)}
    document = {"machine": describe(), "model": arguments.model, "results": results}
    write_result(arguments.out / f"mixed-load-{arguments.model}.json", document)
    print(f"\n{'budget':>7} {'quiet p50/p99 ms':>18} {'loaded p50/p99 ms':>18} {'p99 ratio':>10} {'prefill tok/s':>14}")
    for budget_name, result in results.items():
        if "error" in result:
            print(f"{budget_name:>7} {result['error']}")
            continue
        quiet, loaded = result["quiet"], result["loaded"]
        print(
            f"{budget_name:>7} {quiet['p50_ms']:9.2f}/{quiet['p99_ms']:7.2f} {loaded['p50_ms']:10.2f}/"
            f"{loaded['p99_ms']:7.2f} {result['p99_ratio']:10.2f} {loaded['prompt_tokens_per_s']:14,.0f}"
        )


if __name__ == "__main__":
    main()
