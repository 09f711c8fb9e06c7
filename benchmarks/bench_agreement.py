"""Whether `baton bench` reports the engine's speed: beside engine_throughput's section `bench`, in turns on one GPU.

    python -m benchmarks.bench_agreement [--model 0.6b] [--turns 5] [--out benchmarks/results]

Both run nano-vllm's requests through a model of one shape with random weights, in steps of at most as many tokens as
`LLM` takes by itself. Each turn is two processes. Goal: the medians differ by at most 2 %.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import describe, write_result
from benchmarks.random_model import write_model
from benchmarks.shapes import SHAPES
from runtime.config.serving import EngineConfig

GOAL = 0.02
STEP_TOKENS = EngineConfig().max_batch_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="0.6b")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="where there is no git to ask")
    arguments = parser.parse_args()
    engine: list[float] = []
    command: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(Path(scratch) / "model", arguments.model)
        for turn in range(arguments.turns):
            engine.append(_engine(arguments.model, Path(scratch) / "engine", arguments.commit))
            command.append(_command(folder))
            print(f"turn {turn + 1}: {engine[-1]:,.0f} tok/s, `baton bench` {command[-1]:,.0f}", flush=True)
    found = differences(engine, command)
    print(
        f"the medians differ by {found['medians']:.2%} (goal {GOAL:.0%}), the median pair by {found['median_pair']:.2%}"
    )
    if arguments.out:
        document = {
            "machine": describe(arguments.commit),
            "model": arguments.model,
            "max_batch_tokens": STEP_TOKENS,
            "engine_tokens_per_s": engine,
            "command_tokens_per_s": command,
            "differences": found,
        }
        write_result(arguments.out / f"bench-agreement-{arguments.model}.json", document)
    raise SystemExit(abs(found["medians"]) > GOAL)


def differences(engine: list[float], command: list[float]) -> dict[str, float]:
    """The share by which the command reports less than the engine does."""
    pairs = [1 - ours / theirs for theirs, ours in zip(engine, command, strict=True)]
    return {
        "medians": 1 - statistics.median(command) / statistics.median(engine),
        "median_pair": statistics.median(pairs),
    }


def _engine(model: str, out: Path, commit: str | None) -> float:
    arguments = ["--model", model, "--section", "bench", "--max-batch-tokens", str(STEP_TOKENS), "--out", str(out)]
    _run("benchmarks.engine_throughput", *arguments, *(() if commit is None else ("--commit", commit)))
    (result,) = out.glob("*.json")
    measured: dict[str, Any] = json.loads(result.read_text())["results"]["bench"]
    return float(measured["tokens_per_s"])


def _command(folder: Path) -> float:
    (point,) = json.loads(_run("baton", "bench", "--model", str(folder), "--json").splitlines()[-1])["points"]
    return float(point["output_tokens_per_s"])


def _run(module: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


if __name__ == "__main__":
    main()
