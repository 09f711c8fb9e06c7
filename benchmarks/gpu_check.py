"""Checks the engine on this GPU: kernels, layers and whole answers against references, with fresh random inputs.

    python benchmarks/gpu_check.py [--section kernels,layers,greedy,bfloat16,fp8,seeds,backends] [--seed N]

`kernels` runs tests/engine/kernels compiled. `layers` compares hidden states after each layer with transformers in
float32. `greedy` compares the answers to 64 prompts in mixed batches with prefix hits, chunked prefill, preemption and
cancellation, with and without CUDA graphs. `bfloat16` compares the error of our bf16 logits with the error of
transformers' own bf16. `fp8` compares logits and greedy answers of weights in 8 bits with transformers on the values
that these stand for. Every section runs even when another fails. The table comes last; exit code 1 unless all
checks passed.
"""

import argparse
import importlib
import inspect
import itertools
import random
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton_proto.sampling import SamplingParams
from engine.blocks.block_manager import BlockManager
from engine.core.engine import Engine
from engine.cuda.cuda_build import build_cuda_runner
from engine.cuda.cuda_runner import CudaRunner
from engine.loading.loaded_model import load_model
from engine.model.attention import LayerAttention, StepAttention
from engine.model.fp8_matrix import rounded
from engine.model.weights import Weights
from engine.runners.auto import flash_is_available
from engine.sequences.batch import Batch, ScheduledSequence
from engine.sequences.sequence import Sequence
from runtime.checkpoint.model_files import ModelFiles, resolve_model
from runtime.config.serving import EngineConfig
from runtime.device.drivers import memory_of
from runtime.errors import ConfigError
from tests.tiny_families import write_family
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

DEVICE = torch.device("cuda", 0)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"architecture": "qwen3", "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3-tied": {"architecture": "qwen3", "head_dim": 64, "tie_word_embeddings": True},
    "llama": {
        "architecture": "llama",
        "hidden_size": 96,
        "head_dim": 64,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "llama3-rope": {"architecture": "llama", "head_dim": 64, "rope_theta": 5e5, "rope_scaling": LLAMA3},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 256},
    "gemma3": {"head_dim": 256},
    "gpt-oss": {"head_dim": 64},
    "qwen3moe": {"head_dim": 128},
    "phi3": {"head_dim": 96},
    "phi3, windows and part of a head rotated": {"head_dim": 128},
}
"""Of tests.tiny_families, with keys of config.json."""
Row = tuple[str, str, bool, str]  # section, case, whether it passed, what was found


# --- models and runners -----------------------------------------------------------------------------------------------


def write_model(folder: Path, name: str, seed: int) -> ModelFiles:
    own = folder / f"{name}-{seed}"
    if name in FAMILIES:
        return resolve_model(str(write_family(own, name, seed, **FAMILIES[name])))
    return resolve_model(str(write_tiny_model(own, seed=seed, **MODELS[name])))


def reference(files: ModelFiles, dtype: torch.dtype) -> Any:
    import transformers

    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(files.folder, dtype=dtype, attn_implementation="eager")
    return model.to(DEVICE).eval()


def build(
    files: ModelFiles,
    *,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    num_blocks: int = 2048,
    max_batch_tokens: int = 256,
    max_running: int = 24,
    graphs: bool = True,
    flash: bool = False,
    fp8: bool = False,
) -> tuple[CudaRunner, Engine]:
    config = files.config
    shape = (config.num_layers, num_blocks, config.num_kv_heads, 2, block_size, config.head_dim)
    stale = 3.0 if flash else float("nan")  # because flash-attn reads values behind the end of a context
    slab = torch.full(shape, stale, dtype=dtype, device=DEVICE)
    runner = build_cuda_runner(
        config,
        Weights(files.folder, dtype, memory_of(DEVICE), fp8=fp8, keeps_fp8=fp8),
        slab,
        files.eos_token_ids,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        max_model_len=2048,
        flash=flash,
    )
    if graphs:
        runner.capture()
    engine = Engine(
        runner,
        BlockManager(num_blocks, block_size),
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        eos_token_ids=frozenset(),
    )
    return runner, engine


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# --- kernels ----------------------------------------------------------------------------------------------------------


def kernels(source: random.Random, folder: Path) -> Iterator[Row]:
    _stand_in_for_pytest()
    for path in sorted(Path("tests/engine/kernels").rglob("test_*.py")):
        name, module = path.stem, importlib.import_module(".".join(path.with_suffix("").parts))
        started_s, failures, count = time.perf_counter(), [], 0
        for test, function in inspect.getmembers(module, inspect.isfunction):
            if not test.startswith("test_"):
                continue
            for arguments in _cases(function):
                count += 1
                torch.manual_seed(source.randrange(2**32))
                try:
                    function(**arguments)
                    torch.cuda.synchronize()
                except Exception as error:
                    if not failures:
                        traceback.print_exc()
                    shown = str(error).strip().splitlines()
                    failures.append(f"{test}{arguments}: {type(error).__name__} {shown[0][:160] if shown else ''}")
        for failure in failures[:6]:
            print("  FAILED", failure)
        seconds = time.perf_counter() - started_s
        yield "kernels", name, not failures, f"{count - len(failures)} of {count} cases, {seconds:.0f} s"


def _cases(function: Any) -> Iterator[dict[str, Any]]:
    """The parameters that pytest.mark.parametrize set, combined as pytest combines them."""
    axes = []
    for mark in getattr(function, "pytestmark", []):
        if getattr(mark, "name", "parametrize") != "parametrize":
            continue
        names = mark.args[0] if isinstance(mark.args[0], list | tuple) else [n.strip() for n in mark.args[0].split(",")]
        single = len(names) == 1
        axes.append([dict(zip(names, (value,) if single else value, strict=True)) for value in mark.args[1]])
    for combination in itertools.product(*axes):
        yield {name: value for part in combination for name, value in part.items()}


def _stand_in_for_pytest() -> None:
    """Stands in for pytest, which a GPU machine may lack: of its marks, test modules need only `parametrize`."""
    try:
        importlib.import_module("pytest")
    except ModuleNotFoundError:

        def parametrize(*args: Any, ids: Any = None) -> Callable[[Any], Any]:
            def mark(function: Any) -> Any:
                function.pytestmark = [*getattr(function, "pytestmark", []), types.SimpleNamespace(args=args)]
                return function

            return mark

        stand_in = types.ModuleType("pytest")
        others = {"slow": None, "filterwarnings": lambda _: lambda function: function}
        stand_in.mark = types.SimpleNamespace(parametrize=parametrize, **others)  # type: ignore[attr-defined]
        sys.modules["pytest"] = stand_in


# --- layers -----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def run_layers(
    runner: CudaRunner, tokens: list[int], chunks: list[int], block_size: int
) -> tuple[list[Tensor], Tensor]:
    """Compares hidden states after each layer, and logits, of one sequence run in chunks; a chunk of 1 is a decode."""
    sequence = Sequence("layers", tokens, len(tokens), SamplingParams(max_tokens=1))
    sequence.block_table = torch.randperm(len(tokens) // block_size + 2).tolist()
    model, collected, logits, start = runner._model, [], [], 0
    layers: list[list[Tensor]] = [[] for _ in model.layers]
    for size in chunks:
        item = [ScheduledSequence(sequence, start, size, sample=True)]
        batch = Batch(item, []) if size > 1 else Batch([], item)
        shape = runner._buffer.shape(batch)
        runner._buffer.upload(runner._buffer.pack(batch, shape, {}))
        inputs = runner._buffer.view(shape)
        bound = [LayerAttention(attention, inputs) for attention in runner._attentions]
        attend = StepAttention(bound, runner._caches, size if size > 1 else 0, None)
        hidden = model.embed(inputs.token_ids)
        for index, layer in enumerate(model.layers):
            layer.forward(hidden, attend)
            model.operations.settle(hidden)
            layers[index].append(hidden.clone())
        logits.append(model.logits(hidden))
        start += size
    assert start == len(tokens)
    collected = [torch.cat(parts) for parts in layers]
    return collected, torch.cat(logits)


def layers(source: random.Random, folder: Path) -> Iterator[Row]:
    dense = (("qwen3", 16), ("qwen3-tied", 64), ("llama", 32), ("llama3-rope", 128))
    for name, block_size in (*dense, *((name, 64) for name in FAMILIES)):
        files = write_model(folder, name, source.randrange(10**6))
        model = reference(files, torch.float32)
        runner, _ = build(files, block_size=block_size, graphs=False, max_batch_tokens=512)
        tokens = [source.randrange(VOCAB_SIZE) for _ in range(500)]
        seen, expected = _watch_layers(model, tokens)
        found, logits = run_layers(runner, tokens, [130, 1, 200, 1, 160, *[1] * 8], block_size)
        errors = [relative_error(ours, theirs[0]) for ours, theirs in zip(found, seen, strict=True)]
        errors.append(relative_error(logits, expected))
        agree = torch.equal(logits.argmax(-1), expected.argmax(-1))
        shown = " ".join(f"{error:.1e}" for error in errors)
        limit = 1e-4 if files.config.attention_softcap else 1e-5  # a soft cap of 50 rounds scores to some 1e-5
        yield "layers", f"{name}, block {block_size}", max(errors) < limit and agree, f"{shown} argmax equal {agree}"


@torch.inference_mode()
def _watch_layers(model: Any, tokens: list[int]) -> tuple[list[Tensor], Tensor]:
    """The hidden states after each layer and the logits that transformers computes."""
    seen: list[Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, out: seen.append(out[0] if isinstance(out, tuple) else out))
    logits: Tensor = model(torch.tensor([tokens], device=DEVICE)).logits[0]
    return seen, logits


# --- whole answers ----------------------------------------------------------------------------------------------------

NUM_PROMPTS, MAX_TOKENS = 64, 40
SMALL_POOL, LARGE_POOL = 1024, 65536  # tokens


def greedy(source: random.Random, folder: Path) -> Iterator[Row]:
    for name, block_size in (("qwen3", 16), ("llama3-rope", 32), ("gemma3", 32), ("gpt-oss", 32), ("qwen3moe", 32)):
        files = write_model(folder, name, source.randrange(10**6))
        model = reference(files, torch.float32)
        shared = [source.randrange(VOCAB_SIZE) for _ in range(200)]
        prompts = []
        for index in range(NUM_PROMPTS):
            own = [source.randrange(VOCAB_SIZE) for _ in range(source.choice([1, 3, 16, 17, 64, 65, 130, 300]))]
            prompts.append(shared + own if index % 3 == 0 else own)
        for graphs, pool in ((True, SMALL_POOL), (False, SMALL_POOL), (True, LARGE_POOL)):
            num_blocks = pool // block_size
            _, engine = build(files, block_size=block_size, num_blocks=num_blocks, graphs=graphs)
            started_s = time.perf_counter()
            answers, hits = _serve(engine, prompts, source)
            wrong = [_check_greedy(model, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
            problems = [problem for problem in wrong if problem]
            for problem in problems[:3]:
                print("  ", problem)
            distinct = sum(len(set(answer)) for answer in answers) / len(answers)
            preempted = engine.scheduler.num_preemptions
            found = (
                f"{NUM_PROMPTS - len(problems)} of {NUM_PROMPTS} equal, {preempted} preemptions, {hits} cached tokens, "
                f"{distinct:.0f} distinct tokens each, {time.perf_counter() - started_s:.0f} s"
            )
            passed = not problems and distinct > 4 and hits > 0 and (preempted > 0 or pool == LARGE_POOL)
            yield "greedy", f"{name}, block {block_size}, graphs {graphs}, {num_blocks} blocks", passed, found


def _serve(engine: Engine, prompts: list[list[int]], source: random.Random) -> tuple[list[list[int]], int]:
    """The answers to the prompts, which arrive in random order while other requests come and are cancelled."""
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    arriving = [Sequence(str(index), list(prompt), len(prompt), sampling) for index, prompt in enumerate(prompts)]
    sequences = list(arriving)
    source.shuffle(arriving)
    doomed: list[str] = []
    answers: list[list[int]] = [[] for _ in prompts]
    for step in range(100_000):
        for _ in range(min(len(arriving), source.randrange(4))):
            engine.add(arriving.pop())
        if step % 7 == 3 and arriving:
            prompt = [source.randrange(VOCAB_SIZE) for _ in range(90)]
            doomed.append(f"doomed {step}")
            engine.add(Sequence(doomed[-1], prompt, len(prompt), sampling))
        if doomed and source.random() < 0.2:
            engine.abort(doomed.pop(0))
        for output in engine.step().outputs:
            assert output.error is None, output.error
            if not output.sequence.request_id.startswith("doomed"):
                answers[int(output.sequence.request_id)] += output.token_ids
        problems = engine.check_integrity()
        assert not problems, problems
        if not arriving and not engine.has_work:
            assert engine.block_manager.num_used == 0
            return answers, sum(sequence.num_cached_tokens for sequence in sequences)
    raise AssertionError("the engine does not come to an end")


@torch.inference_mode()
def _check_greedy(model: Any, prompt: list[int], answer: list[int]) -> str | None:
    """Checks that each token is the one that transformers finds most probable after the same tokens."""
    if len(answer) != MAX_TOKENS:
        return f"{len(answer)} tokens came out"
    logits = model(torch.tensor([prompt + answer[:-1]], device=DEVICE)).logits[0, len(prompt) - 1 :]
    best = logits.argmax(-1).tolist()
    if best == answer:
        return None
    at = next(index for index, (ours, theirs) in enumerate(zip(answer, best, strict=True)) if ours != theirs)
    margin = float(logits[at, best[at]] - logits[at, answer[at]])
    return f"prompt of {len(prompt)}: token {at} is {answer[at]}, expected {best[at]}, which is ahead by {margin:.2e}"


# --- bf16, seeds, flash -----------------------------------------------------------------------------------------------


def bfloat16(source: random.Random, folder: Path) -> Iterator[Row]:
    for flash in (False, True):
        if flash and not flash_is_available(DEVICE, torch.bfloat16):
            continue
        for name in ("qwen3", "llama", *(() if flash else FAMILIES)):
            files = write_model(folder, name, source.randrange(10**6))
            tokens = [source.randrange(VOCAB_SIZE) for _ in range(400)]
            ids = torch.tensor([tokens], device=DEVICE)
            with torch.inference_mode():
                exact = reference(files, torch.float32)(ids).logits[0]
                theirs = relative_error(reference(files, torch.bfloat16)(ids).logits[0], exact)
            runner, _ = build(
                files, dtype=torch.bfloat16, block_size=64, graphs=False, max_batch_tokens=512, flash=flash
            )
            _, logits = run_layers(runner, tokens, [130, 1, 200, 61, *[1] * 8], 64)
            ours = relative_error(logits, exact)
            case = f"{name}{', flash' if flash else ''}"
            yield "bfloat16", case, ours < 1.3 * theirs, f"error {ours:.2e}, transformers {theirs:.2e}"


def fp8(source: random.Random, folder: Path) -> Iterator[Row]:
    """Our logits must be nearer to those with rounded activations than these are to exact ones, and most tokens theirs.
    One or two tokens alone are computed with exact activations."""
    for name in ("qwen3", "llama"):
        files = write_model(folder, name, source.randrange(10**6))
        model = reference(files, torch.float32)
        ids = torch.randint(VOCAB_SIZE, (1, 400), device=DEVICE)
        projections = [module for key, module in model.named_modules() if key.endswith("_proj")]
        with torch.inference_mode():
            for module in projections:
                module.weight.copy_(rounded(module.weight, module.weight.shape[1]).products())
            exact = model(ids).logits[0]
            for module in projections:
                module.register_forward_pre_hook(
                    lambda _, given: (rounded(given[0][0], given[0].shape[2]).products()[None],)
                )
            expected = model(ids).logits[0]
        runner, _ = build(files, dtype=torch.bfloat16, block_size=64, graphs=False, max_batch_tokens=512, fp8=True)
        _, logits = run_layers(runner, ids[0].tolist(), [130, 200, 70], 64)
        error, gap = relative_error(logits, expected), relative_error(expected, exact)
        yield "fp8", f"{name}, logits", error < gap, f"error {error:.2e}, of rounded activations {gap:.2e}"
        _, engine = build(files, dtype=torch.bfloat16, num_blocks=4096, fp8=True)
        prompts = [[source.randrange(VOCAB_SIZE) for _ in range(source.randint(1, 200))] for _ in range(32)]
        answers, _ = _serve(engine, prompts, source)
        right = first = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + answer[:-1]], device=DEVICE)).logits[0, len(prompt) - 1 :]
            best = logits.argmax(-1).tolist()
            right += sum(map(int.__eq__, answer, best))
            first += answer[0] == best[0]
        count = sum(map(len, answers))
        passed = right > count / 2 and first > len(prompts) / 4  # first ones are of other graphs
        found = f"{right} of {count} tokens and {first} of {len(prompts)} first ones are the most probable"
        yield "fp8", f"{name}, greedy, graphs", passed, found


def seeds(source: random.Random, folder: Path) -> Iterator[Row]:
    """Checks that a seed gives the same text whatever else is in the batch."""
    files = write_model(folder, "qwen3", source.randrange(10**6))
    work = []
    for index in range(20):
        prompt = [source.randrange(VOCAB_SIZE) for _ in range(source.randint(5, 300))]
        sampling = SamplingParams(max_tokens=30, seed=source.randrange(2**63), temperature=0.8, ignore_eos=True)
        work.append((f"r{index}", prompt, sampling))
    texts = []
    for together, graphs in ((True, True), (False, True), (True, False)):
        _, engine = build(files, graphs=graphs)
        outputs: dict[str, list[int]] = {name: [] for name, _, _ in work}
        for name, prompt, sampling in work:
            engine.add(Sequence(name, list(prompt), len(prompt), sampling))
            while engine.has_work and not together:
                _collect(engine, outputs)
        while engine.has_work:
            _collect(engine, outputs)
        texts.append(outputs)
    equal = [sum(texts[0][name] == text[name] for name in texts[0]) for text in texts[1:]]
    yield "seeds", "together, alone, without graphs", equal == [20, 20], f"{equal} of 20 equal"


def _collect(engine: Engine, outputs: dict[str, list[int]]) -> None:
    for output in engine.step().outputs:
        outputs[output.sequence.request_id] += output.token_ids


def backends(source: random.Random, folder: Path) -> Iterator[Row]:
    """Loads a model as a worker does: with each attention backend, and with KV memory measured or given."""
    files = write_model(folder, "qwen3", source.randrange(10**6))
    model = reference(files, torch.float32)
    prompts = [[source.randrange(VOCAB_SIZE) for _ in range(source.randint(1, 200))] for _ in range(16)]
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    for attention, kv_memory in (("auto", "auto"), ("triton", "64MiB"), ("torch", "64MiB")):
        config = EngineConfig(device="cuda", dtype="float32", attention=attention, kv_memory=kv_memory, block_size=64)
        loaded = load_model(files, config)
        num_blocks, limit = loaded.slab.layout.num_blocks, config.max_batch_tokens
        engine = Engine(
            loaded.runner,
            BlockManager(num_blocks, 64),
            max_batch_tokens=limit,
            max_running=config.max_running,
            eos_token_ids=frozenset(),
        )
        outputs: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
        for index, prompt in enumerate(prompts):
            engine.add(Sequence(str(index), list(prompt), len(prompt), sampling))
        while engine.has_work:
            _collect(engine, outputs)
        problems = [p for i, prompt in enumerate(prompts) if (p := _check_greedy(model, prompt, outputs[str(i)]))]
        found = f"{len(prompts) - len(problems)} of {len(prompts)} equal, {num_blocks} blocks"
        yield "backends", f"attention {attention}, KV memory {kv_memory}", not problems, found
        del loaded, engine
        torch.cuda.empty_cache()
    try:
        load_model(files, EngineConfig(device="cuda", kv_memory="900GiB"))
        yield "backends", "more KV memory than there is", False, "was accepted"
    except ConfigError as error:
        yield "backends", "more KV memory than there is", True, f"refused: {error}"


SECTIONS: dict[str, Callable[[random.Random, Path], Iterator[Row]]] = {
    "kernels": kernels,
    "layers": layers,
    "greedy": greedy,
    "bfloat16": bfloat16,
    "fp8": fp8,
    "seeds": seeds,
    "backends": backends,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", default=",".join(SECTIONS))
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, which is printed")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(10**9)
    source = random.Random(seed)
    torch.manual_seed(seed)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.section.split(","):
            started_s = time.perf_counter()
            try:
                for row in SECTIONS[name](source, Path(folder)):
                    rows.append(row)
                    print(*row, flush=True)
            except Exception as error:
                traceback.print_exc()
                rows.append((name, "-", False, f"{type(error).__name__}: {str(error)[:200]}"))
            print(f"{name}: {time.perf_counter() - started_s:.0f} s", flush=True)
    print(f"\nseed {seed}, {torch.cuda.get_device_name()}")
    for section, case, passed, found in rows:
        print(f"{'ok  ' if passed else 'FAIL'} {section:<9} {case:<48} {found}")
    sys.exit(0 if rows and all(passed for _, _, passed, _ in rows) else 1)


if __name__ == "__main__":
    main()
