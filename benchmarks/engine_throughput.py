"""Throughput of the engine on one GPU, beside nano-vllm on the same GPU: random weights, random tokens, bf16.

    python benchmarks/engine_throughput.py --model 0.6b
    python benchmarks/engine_throughput.py --model 8b --section decode1,prefill --profile

Sections: `bench` is nano-vllm's bench.py (its 256 requests, prompts and outputs of 100 to 1024 tokens), measured as
`baton bench` measures it; `decode256`, `decode1` and `decode1_32k` time decoding alone; `prefill` runs 128 prompts of
1024 tokens. Each is warmed up first.
"""

import argparse
import random
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from baton.bench.in_process import timed
from baton.bench.measured import summed
from baton.bench.workload import NANO_VLLM_BENCH, random_ids
from baton_proto.sampling import SamplingParams
from benchmarks.kernel_profile import profile_steps
from benchmarks.machine import describe, measure_ceilings, seconds_since_process_start, write_result
from benchmarks.shapes import SHAPES, blocks_of
from engine.core.engine import Engine
from engine.cuda.cuda_build import GpuEngine, build_on_gpu
from engine.cuda.cuda_runner import CudaStep
from engine.model.random_weights import RandomWeights
from engine.model.shard import Shard
from engine.runners.auto import resolve_attention
from engine.sequences.batch import Batch, LayerDone, SampledToken
from engine.sequences.sequence import Sequence
from runtime.config.planner import TargetsConfig
from runtime.config.serving import EngineConfig
from runtime.device.drivers import memory_of

NANO_VLLM = {
    "0.6b": {"bench": 18098, "decode256": 21800, "decode1": 432, "prefill": 367600},
    "8b": {"bench": 8868, "decode256": 12200, "decode1": 168, "prefill": 42300},
}
GOALS = {
    "0.6b": {"bench": 27000, "decode256": 27500, "decode1": 1200, "decode1_32k": 600, "prefill": 550000, "ready": 20},
    "8b": {"bench": 11500, "decode256": 16500, "decode1": 240, "decode1_32k": 160, "prefill": 48000, "ready": 30},
}
SECTIONS = ("decode1", "decode1_32k", "decode256", "prefill", "bench")


class HostClock:
    """A runner that records how long the host works on a step and how long it waits for the GPU's result."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.num_layers, self.depth = inner.num_layers, inner.depth
        self.submit_s = self.wait_s = 0.0

    def submit(self, batch: Batch, layer_done: LayerDone | None) -> "TimedStep":
        started_s = time.perf_counter()
        step = self.inner.submit(batch, layer_done)
        self.submit_s += time.perf_counter() - started_s
        return TimedStep(self, step)


class TimedStep:
    def __init__(self, clock: HostClock, step: CudaStep) -> None:
        self.clock, self.step = clock, step

    def draw(self) -> None:
        started_s = time.perf_counter()
        self.step.draw()
        self.clock.submit_s += time.perf_counter() - started_s

    def tokens(self) -> Any:
        started_s = time.perf_counter()
        tokens: list[SampledToken] = list(self.step.tokens())
        self.clock.wait_s += time.perf_counter() - started_s
        return tokens


class Bench:
    def __init__(self, gpu: GpuEngine, arguments: argparse.Namespace) -> None:
        model = SHAPES[arguments.model]
        self.vocab_size = model.vocab_size
        self.clock = HostClock(gpu.runner)
        self.engine = Engine(
            self.clock,
            blocks_of(gpu.slab.layout, model),
            max_batch_tokens=arguments.max_batch_tokens,
            max_running=arguments.max_running,
            eos_token_ids=frozenset(),
            targets=TargetsConfig(itl_ms=1000.0),  # as LLM has it
        )
        self.random = random.Random(1)
        self.profiles: dict[str, Any] = {}
        self.arguments = arguments

    def add(self, prompt_tokens: int, max_tokens: int, index: int) -> None:
        prompt = [self.random.randrange(10000) for _ in range(prompt_tokens)]
        sampling = SamplingParams(max_tokens=max_tokens, seed=index, temperature=0.6, ignore_eos=True)
        self.engine.add(Sequence(f"r{index}", prompt, len(prompt), sampling))

    def finish(self) -> tuple[int, float]:
        """Runs the engine until all sequences have ended. Returns (output tokens, seconds)."""
        num_tokens, started_s = 0, time.perf_counter()
        while self.engine.has_work:
            for output in self.engine.step().outputs:
                assert output.error is None, output.error
                num_tokens += len(output.token_ids)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started_s
        assert self.engine.check_integrity() == []
        self.engine.clear_cache()
        return num_tokens, seconds

    def bench(self) -> dict[str, float]:
        asks = random_ids(NANO_VLLM_BENCH, self.vocab_size)
        point = summed("bench", timed(self.engine, asks, temperature=0.6))
        assert point.output_tokens == sum(max_tokens for _, max_tokens in asks)
        assert self.engine.check_integrity() == []
        return {"tokens_per_s": point.output_tokens_per_s, "seconds": point.seconds}

    def prefill(self) -> dict[str, float]:
        for index in range(128):
            self.add(1024, 1, index)
        num_tokens, seconds = self.finish()
        assert num_tokens == 128
        return {"tokens_per_s": 128 * 1024 / seconds, "seconds": seconds}

    def decode(self, rows: int, context: int, num_steps: int) -> dict[str, float]:
        # Over the timed steps, the context is `context` tokens long on average.
        for index in range(rows):
            self.add(context - num_steps // 2 - 12, num_steps + 60, index)
        while self.engine.load().queued_prefill_tokens or self.engine.load().waiting:
            self.engine.step()
        for _ in range(4):
            self.engine.step()
        self.clock.submit_s = self.clock.wait_s = 0.0
        started_s = time.perf_counter()
        num_tokens = sum(len(output.token_ids) for _ in range(num_steps) for output in self.engine.step().outputs)
        seconds = time.perf_counter() - started_s
        result = {
            "tokens_per_s": num_tokens / seconds,
            "step_ms": seconds / num_steps * 1e3,
            "host_submit_ms": self.clock.submit_s / num_steps * 1e3,
            "host_wait_ms": self.clock.wait_s / num_steps * 1e3,
        }
        if self.arguments.profile:
            self.profiles[f"decode{rows}x{context}"] = profile_steps(lambda: self.engine.step(), 12)
        self.finish()
        return result

    def section(self, name: str) -> dict[str, float]:
        runs: dict[str, Callable[[], dict[str, float]]] = {
            "bench": self.bench,
            "prefill": self.prefill,
            "decode256": lambda: self.decode(256, 1024, 100),
            "decode1": lambda: self.decode(1, 1024, 200),
            "decode1_32k": lambda: self.decode(1, 32768, 150),
        }
        if name.startswith("decode") and name not in runs:
            return self.decode(int(name.removeprefix("decode")), 1024, 100)
        if name == "prefill":  # the first run compiles kernels and chooses matrix products
            self.prefill()
        if name == "prefill" and self.arguments.profile:
            for index in range(32):
                self.add(1024, 1, index)
            self.profiles["prefill"] = profile_steps(lambda: self.engine.step(), 2)
            self.finish()
        return runs[name]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="0.6b")
    parser.add_argument("--section", default=",".join(SECTIONS), help="comma-separated; decodeN: of N rows")
    parser.add_argument("--block-size", type=int, default=64, choices=[16, 32, 64, 128])
    parser.add_argument("--max-batch-tokens", type=int, default=16384)
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=40960)
    parser.add_argument("--attention", choices=["auto", "triton", "flash"], default="auto")
    parser.add_argument("--fp8", action="store_true", help="weights of 8 bits")
    parser.add_argument("--kv-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--profile", action="store_true", help="where the time of a step goes, by kind of kernel")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--commit", help="where there is no git to ask")
    arguments = parser.parse_args()

    device = torch.device("cuda", 0)
    config = SHAPES[arguments.model]
    attention = EngineConfig(attention=arguments.attention, kv_dtype=arguments.kv_dtype)
    flash = resolve_attention(attention, config, device, torch.bfloat16) == "flash"
    gpu = build_on_gpu(
        config,
        RandomWeights(Shard(config, 0, 1), torch.bfloat16, memory_of(device), fp8=arguments.fp8),
        frozenset(),
        kv_dtype=attention.stored_dtype("bfloat16"),
        block_size=arguments.block_size,
        kv_bytes=None,
        max_batch_tokens=arguments.max_batch_tokens,
        max_running=arguments.max_running,
        max_model_len=min(arguments.max_model_len, config.max_position),
        flash=flash,
        graphs=not arguments.no_graphs,
    )
    torch.cuda.synchronize()
    ready_s = seconds_since_process_start()
    print(f"ready after {ready_s:.1f} s, {gpu.slab.layout.num_blocks} blocks of {arguments.block_size}", flush=True)
    bench = Bench(gpu, arguments)
    results: dict[str, Any] = {"ready": {"seconds": ready_s}}
    for name in arguments.section.split(","):
        try:
            started_s = time.perf_counter()
            results[name] = bench.section(name)
            print(f"{name}: {results[name]} ({time.perf_counter() - started_s:.1f} s in all)", flush=True)
        except Exception as error:
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"}
            bench = Bench(gpu, arguments)
    _write(arguments, flash, gpu, results, bench.profiles)
    _print_table(arguments.model, results, bench.profiles)


def _write(
    arguments: argparse.Namespace, flash: bool, gpu: GpuEngine, results: dict[str, Any], profiles: dict[str, Any]
) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    ceilings = measure_ceilings()
    print(f"this GPU: {ceilings}", flush=True)
    document = {
        "machine": describe(arguments.commit),
        "ceilings": ceilings,
        "model": arguments.model,
        "settings": {
            "block_size": arguments.block_size,
            "max_batch_tokens": arguments.max_batch_tokens,
            "max_running": arguments.max_running,
            "prefill_attention": "flash-attn-4" if flash else "triton",
            "cuda_graphs": not arguments.no_graphs,
            "kv_blocks": gpu.slab.layout.num_blocks,
        },
        "results": results,
        "profiles": profiles,
    }
    only = "" if arguments.section == ",".join(SECTIONS) else "-" + arguments.section.replace(",", "-")
    bits = ("-fp8" if arguments.fp8 else "") + ("-kv8" if arguments.kv_dtype == "fp8" else "")
    name = f"engine-{arguments.model}{bits}-block{arguments.block_size}{only}{'-flash' if flash else ''}.json"
    write_result(arguments.out / name, document)


def _print_table(model: str, results: dict[str, Any], profiles: dict[str, Any]) -> None:
    for name, profile in profiles.items():
        print(f"\n{name}: where a step's {profile['wall_ms']:.3f} ms go")
        for category, milliseconds in profile["ms"].items():
            print(f"  {category:<24} {milliseconds:8.3f} ms  {100 * milliseconds / profile['wall_ms']:5.1f} %")
        for kernel, milliseconds in profile["kernels"].items():
            print(f"      {milliseconds:8.3f} ms  {kernel}")
    print(f"\n{model} shape     {'tok/s':>10} {'nano-vllm':>10} {'goal':>10}")
    for name, result in results.items():
        value = result.get("tokens_per_s", result.get("seconds"))
        shown = result.get("error") or f"{value:10,.1f}"
        peer, goal = (known.get(model, {}).get(name, "-") for known in (NANO_VLLM, GOALS))
        print(f"{name:<16} {shown:>10} {peer:>10} {goal:>10}   {_details(result)}")


def _details(result: dict[str, float]) -> str:
    return "  ".join(f"{key} {value:.3f}" for key, value in result.items() if key.endswith("_ms"))


if __name__ == "__main__":
    main()
