"""What grammars cost decodes: a batch of which none, one and every answer follows a JSON schema, by turns in one run.

    python -m benchmarks.grammar_decode [--model 0.6b] [--rows 256] [--context 1024] [--steps 100] [--rounds 5]
        [--json FILE]

Random weights of the model's shape, whose answers are noise without the grammar, and a made-up vocabulary as large as
the model's; `--model tiny` runs on a CPU. Each round decodes the three batches one after the other; the best round of
each counts. Ends with 1 when a loss is above its goal, or an answer leaves its grammar.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton_proto.grammar import Grammar
from baton_proto.sampling import SamplingParams
from benchmarks.machine import describe, write_result
from benchmarks.shapes import SHAPES, blocks_of
from engine.core.engine import Engine
from engine.loading.loaded_model import load_model
from engine.model.random_weights import RandomWeights
from engine.model.shard import Shard
from engine.sequences.batch import Batch, LayerDone, Runner, StepOnItsWay
from engine.sequences.sequence import Sequence
from runtime.checkpoint.model_files import resolve_model
from runtime.config.serving import EngineConfig
from runtime.device.drivers import memory_of
from runtime.grammar.compiler import GrammarCompiler
from tests.tiny_model import write_tiny_model

GOALS = {"one": 0.01, "all": 0.05}
END = "<|end|>"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 200}  # longer than a run, so no answer ends early


def write_vocabulary(folder: Path, size: int) -> int:
    """A byte-level BPE of `size` tokens, most of them random strings of letters, digits and signs. Returns the end's
    id."""
    source, letters = random.Random(0), sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    printed, merges = [letter for letter in letters if letter.isascii()], []
    longer = list(printed)
    while len(vocabulary) < size - 1:
        first, second = source.choice(longer), source.choice(printed)
        if len(first) < 10 and first + second not in vocabulary:
            vocabulary[first + second] = len(vocabulary)
            merges.append((first, second))
            longer.append(first + second)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    return int(tokenizer.token_to_id(END))


class HostClock:
    """A runner that records how long the host submits steps, draws what waits for tokens, and waits for the device."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.num_layers, self.depth = inner.num_layers, inner.depth
        self.seconds = dict.fromkeys(("submit", "draw", "wait"), 0.0)

    def timed(self, what: str, call: Any) -> Any:
        started_s = time.perf_counter()
        result = call()
        self.seconds[what] += time.perf_counter() - started_s
        return result

    def submit(self, batch: Batch, layer_done: LayerDone | None) -> StepOnItsWay:
        return ClockedStep(self, self.timed("submit", lambda: self.inner.submit(batch, layer_done)))


class ClockedStep:
    def __init__(self, clock: HostClock, step: StepOnItsWay) -> None:
        self.clock, self.step = clock, step
        self.scores = step.scores

    def draw(self) -> None:
        self.clock.timed("draw", self.step.draw)

    def tokens(self) -> Any:
        return self.clock.timed("wait", self.step.tokens)


class Decodes:
    def __init__(
        self, engine: Engine, clock: HostClock, grammars: GrammarCompiler, options: argparse.Namespace
    ) -> None:
        self.engine, self.clock, self.grammars, self.options = engine, clock, grammars, options
        self.random = random.Random(1)
        self.grammar = Grammar("json_schema", json.dumps(SCHEMA))

    def run(self, constrained: int) -> dict[str, float]:
        options, engine = self.options, self.engine
        work = [self._sequence(index, index < constrained) for index in range(options.rows)]
        for sequence in work:
            engine.add(sequence)
        while engine.load().queued_prefill_tokens or engine.load().waiting:
            engine.step()
        for _ in range(4):
            engine.step()
        self.clock.seconds = dict.fromkeys(self.clock.seconds, 0.0)
        started_s = time.perf_counter()
        num_tokens = sum(len(one.token_ids) for _ in range(options.steps) for one in engine.step().outputs)
        seconds = time.perf_counter() - started_s
        per_step = {f"{name}_ms": 1e3 * spent / options.steps for name, spent in self.clock.seconds.items()}
        while engine.has_work:
            engine.step()
        engine.clear_cache()
        outside = sum(not self._follows(sequence) for sequence in work[:constrained])
        return {
            "tokens_per_s": num_tokens / seconds,
            "step_ms": 1e3 * seconds / options.steps,
            "outside": outside,
        } | per_step

    def _sequence(self, index: int, constrained: bool) -> Sequence:
        """Over the timed steps, its context is `--context` tokens long on average."""
        options = self.options
        length = max(1, options.context - options.steps // 2 - 12)
        prompt = [self.random.randrange(256) for _ in range(length)]
        sampling = SamplingParams(
            max_tokens=options.steps + 60,
            seed=index,
            temperature=0.6,
            ignore_eos=True,
            grammar=self.grammar if constrained else None,
        )
        matcher = self.grammars.matcher(self.grammar) if constrained else None
        return Sequence(f"r{index}", prompt, length, sampling, matcher=matcher)

    def _follows(self, sequence: Sequence) -> bool:
        """Whether a fresh matcher takes the whole answer."""
        fresh = self.grammars.matcher(self.grammar)
        fresh.mask(sequence.output_token_ids)
        return not fresh.problem and sequence.num_output_tokens > self.options.steps


def build(folder: Path, options: argparse.Namespace) -> Decodes:
    if options.model == "tiny":
        torch.set_num_threads(1)
        files = resolve_model(str(write_tiny_model(folder, vocab_size=2000)))
        loaded = load_model(files, EngineConfig(device="cpu", kv_memory="256MiB", block_size=16))
        config, slab = files.config, loaded.slab
        runner: Runner = loaded.runner
    else:
        from engine.cuda.cuda_build import build_on_gpu
        from engine.runners.auto import flash_is_available

        config, device = SHAPES[options.model], torch.device("cuda", 0)
        gpu = build_on_gpu(
            config,
            RandomWeights(Shard(config, 0, 1), torch.bfloat16, memory_of(device)),
            frozenset(),
            kv_dtype="bfloat16",
            block_size=64,
            kv_bytes=None,
            max_batch_tokens=16384,
            max_running=options.rows,
            max_model_len=config.max_position,
            flash=flash_is_available(device, torch.bfloat16),
        )
        runner, slab = gpu.runner, gpu.slab
    end = write_vocabulary(folder, config.vocab_size)
    clock, manager = HostClock(runner), blocks_of(slab.layout, config)
    engine = Engine(clock, manager, max_batch_tokens=16384, max_running=options.rows, eos_token_ids=frozenset((end,)))
    return Decodes(engine, clock, GrammarCompiler(folder, config.vocab_size, [end]), options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SHAPES, "tiny"], default="0.6b")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    counts = {"none": 0, "one": 1, "all": options.rows}
    best: dict[str, dict[str, float]] = {}
    outside = 0.0
    with tempfile.TemporaryDirectory(prefix="baton-grammars-") as folder:
        decodes = build(Path(folder), options)
        decodes.run(options.rows)  # compiles kernels, and chooses matrix products
        for _ in range(options.rounds):
            for name, count in counts.items():
                found = decodes.run(count)
                outside += found.pop("outside")
                if name not in best or found["tokens_per_s"] > best[name]["tokens_per_s"]:
                    best[name] = found
    for row in best.values():
        row["loss"] = 1 - row["tokens_per_s"] / best["none"]["tokens_per_s"]
    table = Table(
        title=f"{options.rows} decodes; submit, draw, wait: of the host, per step; {outside:.0f} answers outside"
    )
    for column in ("with a grammar", *best["none"]):
        table.add_column(column, justify="right")
    for name, row in best.items():
        table.add_row(name, *(f"{value:.3f}" if abs(value) < 100 else f"{value:,.0f}" for value in row.values()))
    Console().print(table)
    settings = {"settings": {key: str(value) for key, value in vars(options).items()}, "goals": GOALS}
    if options.json is not None:
        record = {"benchmark": "grammar_decode", **describe(), **settings, "outside": outside, "results": best}
        write_result(options.json, record)
    sys.exit(bool(outside) or any(best[name]["loss"] > goal for name, goal in GOALS.items()))


if __name__ == "__main__":
    main()
