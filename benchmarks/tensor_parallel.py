"""Gain of several GPUs for one model: step times and prefill of 1, 2 and 4 ranks; random weights and tokens, bf16.

    python benchmarks/tensor_parallel.py --model 8b --ranks 1,2,4

Each number of ranks is measured in a process of its own, which is ended when it takes too long. `2n` stands for 2 ranks
that leave all sums to NCCL (BATON_PEER_SUM=0).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_throughput import Bench
from benchmarks.machine import describe, write_result
from benchmarks.shapes import SHAPES
from engine.loading.loaded_model import load_model
from engine.parallel.peer_memory import SWITCH
from engine.ranks.tensor_parallel import load_tensor_parallel
from runtime.checkpoint.model_files import ModelFiles
from runtime.config.serving import EngineConfig

ROOT = Path(__file__).parents[1]
RESULT = "RESULT "
ALL_TO_NCCL = "n"
GOALS = {"decode1": 0.65, "decode128": 0.62, "prefill": 1.8}  # for 2 ranks beside 1, with the 8B shape
CONTEXT = 1024


def measure(arguments: argparse.Namespace) -> None:
    """Measures one number of ranks and prints the result as a line of JSON. Call it in a process of its own."""
    size = int(arguments.only.removesuffix(ALL_TO_NCCL))
    config = EngineConfig(
        device="cuda",
        dtype="bfloat16",
        attention=arguments.attention,
        block_size=64,
        max_model_len=4096,
        max_batch_tokens=16384,
        max_running=128,
        tensor_parallel=size,
    )
    files = ModelFiles(Path(), arguments.model, SHAPES[arguments.model], frozenset())
    started_s = time.perf_counter()
    load: Any = load_model if size == 1 else load_tensor_parallel
    loaded = load(files, config, random_weights=True)
    torch.cuda.synchronize()
    results: dict[str, Any] = {"load_s": time.perf_counter() - started_s, "blocks": loaded.slab.layout.num_blocks}
    print(f"{arguments.only}: loaded in {results['load_s']:.1f} s, {results['blocks']} blocks", flush=True)
    settings = argparse.Namespace(model=arguments.model, max_batch_tokens=16384, max_running=128, profile=False)
    bench = Bench(loaded, settings)
    bench.prefill()  # the first run compiles kernels and chooses matrix products
    results["prefill"] = bench.prefill()
    for rows, steps in ((1, 200), (8, 100), (32, 100), (128, 100)):
        results[f"decode{rows}"] = bench.decode(rows, CONTEXT, steps)
    print(RESULT + json.dumps(results), flush=True)
    os._exit(0)  # skips the exit handlers of GPU libraries; the other ranks die with this process


def run_alone(case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs measure() in another process."""
    command = [sys.executable, __file__, "--only", case, "--model", arguments.model]
    command += ["--attention", arguments.attention]
    paths = [str(ROOT), str(ROOT / "proto"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if case.endswith(ALL_TO_NCCL):
        environment[SWITCH] = "0"
    # Its end also ends the ranks that it starts.
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate(timeout=arguments.timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": f"took longer than {arguments.timeout_s:.0f} s"}
    sys.stdout.write(output)
    lines = [line for line in output.splitlines() if line.startswith(RESULT)]
    return json.loads(lines[0].removeprefix(RESULT)) if lines else {"error": f"exit code {process.returncode}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="8b")
    parser.add_argument("--ranks", default="1,2,2n,4", help="comma-separated; more than there are GPUs are left out")
    parser.add_argument("--attention", choices=["auto", "triton", "flash"], default="auto")
    parser.add_argument("--timeout-s", type=float, default=240.0, help="for each number of ranks")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--commit", help="where there is no git to ask")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        measure(arguments)
        return
    cases = [case for case in arguments.ranks.split(",") if _ranks(case) <= torch.cuda.device_count()]
    results = {case: run_alone(case, arguments) for case in cases}
    document = {
        "machine": describe(arguments.commit),
        "model": arguments.model,
        "settings": {"context": CONTEXT, "attention": arguments.attention},
        "results": results,
    }
    write_result(arguments.out / f"tensor-parallel-{arguments.model}.json", document)
    _print_table(arguments.model, results)


def _ranks(case: str) -> int:
    return int(case.removesuffix(ALL_TO_NCCL))


def _print_table(model: str, results: dict[str, Any]) -> None:
    """Prints step times in ms and prefill in tokens/s, each with its ratio to one rank's."""
    columns = ("decode1", "decode8", "decode32", "decode128", "prefill")
    alone = results.get("1", {})
    print(f"\nQwen3-{model.upper()} shape, {CONTEXT} tokens of context")
    print(f"{'ranks':<8}" + "".join(f"{name:>18}" for name in columns))
    for case, result in results.items():
        if "error" in result:
            print(f"{case:<8} {result['error']}")
            continue
        cells = [_cell(result[name], alone.get(name)) for name in columns]
        print(f"{case:<8}" + "".join(f"{cell:>18}" for cell in cells))
    print(f"{'goal, 2':<8}" + "".join(f"{f'({GOALS[name]:.2f})' if name in GOALS else '':>18}" for name in columns))


def _cell(result: dict[str, float], alone: dict[str, float] | None) -> str:
    key = "step_ms" if "step_ms" in result else "tokens_per_s"
    shown = f"{result[key]:.3f} ms" if key == "step_ms" else f"{result[key]:,.0f}/s"
    return shown if alone is None else f"{shown} ({result[key] / alone[key]:.2f})"


if __name__ == "__main__":
    main()
