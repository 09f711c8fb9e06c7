"""What 8 bits cost in quality: perplexity of this repository's pages, and how long greedy answers stay the same.

    python -m benchmarks.fp8_quality [--model smollm2] [--device cuda] [--windows 8] [--json FILE]

The first row of the table is what the others are compared with: float32 on a CPU, bfloat16 on a GPU. A CPU computes
`engine.dtype: fp8` with exact activations; `rows in 8 bits` rounds them, too, as a GPU does where it has more than two
rows. `KV in 8 bits` is `engine.kv_dtype: fp8`. Each window of a page is a prompt of its own; an answer begins behind
the first tokens of one. Ends with 1 when the perplexity of a row is more than 1 % above the first one's.
"""

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor

from baton_proto.sampling import SamplingParams
from benchmarks.machine import describe, write_result
from benchmarks.shapes import blocks_of
from engine.core.engine import Engine
from engine.loading.loaded_model import load_model
from engine.model.fp8_matrix import Weight, dense, rounded
from engine.model.operations import TorchOperations
from engine.sequences.sequence import Sequence
from runtime.checkpoint.model_files import ModelFiles, resolve_model
from runtime.config.serving import EngineConfig

GOAL = 1.01
PAGES = ("README.md", "docs/operating.md")
WINDOW, BEGINNING, ANSWER = 1024, 64, 64  # tokens
ROUNDED = "fp8, rows in 8 bits"
KV = ", KV in 8 bits"


class RoundedRows(TorchOperations):
    """What the kernels of a GPU compute with many rows."""

    def linear(self, x: Tensor, weight: Weight, out: Tensor | None = None) -> Tensor:
        return super().linear(rounded(x, x.shape[1]).products().to(x.dtype), weight, out)

    def norm_linear(
        self, hidden: Tensor, norm: Tensor, eps: float, weight: Weight, out: Tensor | None = None
    ) -> Tensor:
        return self.linear(self.norm(hidden, norm, eps), weight, out)

    def add_linear(self, hidden: Tensor, x: Tensor, weight: Weight) -> None:
        hidden.add_(self.linear(x, dense(weight, x.dtype)))


def engine_of(files: ModelFiles, name: str, device: str) -> Engine:
    kv_dtype: Literal["auto", "fp8"] = "fp8" if name.endswith(KV) else "auto"
    dtype: Any = name.split(",")[0]
    config = EngineConfig(device=device, dtype=dtype, kv_dtype=kv_dtype, kv_memory="1GiB", max_batch_tokens=WINDOW)
    model = load_model(files, config)
    if name == ROUNDED:
        for layer in model.runner._model.layers:  # type: ignore[attr-defined]
            layer.operations = RoundedRows()
    manager = blocks_of(model.slab.layout, files.config)
    return Engine(model.runner, manager, max_batch_tokens=WINDOW, max_running=64, eos_token_ids=frozenset())


def run(engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> tuple[list[list[int]], list[float]]:
    """The answers, and the log-probabilities of prompt tokens where they are asked for."""
    answers: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    scores: list[float] = []
    engine.clear_cache()
    for name, prompt in zip(answers, prompts, strict=True):
        engine.add(Sequence(name, list(prompt), len(prompt), sampling))
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None, output.error
            answers[output.sequence.request_id] += output.token_ids
            if output.prompt_logprobs is not None:
                scores += np.frombuffer(output.prompt_logprobs.logprobs, np.float32).tolist()
    return list(answers.values()), scores


def same_length(ours: list[int], theirs: list[int]) -> int:
    return next((at for at, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), len(ours))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    files = resolve_model(arguments.model)
    tokenizer = Tokenizer.from_file(str(files.folder / "tokenizer.json"))
    tokens = [token for page in PAGES for token in tokenizer.encode(Path(page).read_text()).ids]
    windows = [tokens[at : at + WINDOW] for at in range(0, arguments.windows * WINDOW, WINDOW)]
    table = Table(
        "engine.dtype", "perplexity", "to the first", f"tokens of {ANSWER} until answers part", "equal answers"
    )
    rows: list[dict[str, Any]] = []
    expected: list[list[int]] = []
    on_cpu = arguments.device == "cpu"
    plain = "float32" if on_cpu else "bfloat16"
    for name in (plain, plain + KV, "fp8", "fp8" + KV, *([ROUNDED] if on_cpu else [])):
        engine = engine_of(files, name, arguments.device)
        _, scores = run(engine, windows, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
        greedy = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
        answers, _ = run(engine, [window[:BEGINNING] for window in windows], greedy)
        expected = expected or answers
        same = [same_length(*pair) for pair in zip(answers, expected, strict=True)]
        perplexity = math.exp(-statistics.fmean(scores))
        ratio = perplexity / rows[0]["perplexity"] if rows else 1.0
        rows.append({"dtype": name, "perplexity": perplexity, "ratio": ratio, "tokens": len(scores), "same": same})
        equal = f"{same.count(ANSWER)} of {len(same)}"
        table.add_row(name, f"{perplexity:.3f}", f"{ratio:.4f}", f"{statistics.median(same):.0f} (median)", equal)
    Console().print(table)
    if arguments.json:
        write_result(
            arguments.json, {**describe(), "model": arguments.model, "device": arguments.device, "dtypes": rows}
        )
    return int(any(row["ratio"] > GOAL for row in rows))


if __name__ == "__main__":
    sys.exit(main())
