"""The GPU's runner against the plain torch one: the same engine, prompts and seeds; compiled on a GPU, in Triton's
interpreter elsewhere."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from baton_proto.grammar import Grammar
from baton_proto.sampling import SamplingParams
from engine.blocks.window_blocks import NOWHERE
from engine.core.engine import Engine
from engine.cuda import decode_graphs
from engine.cuda.cuda_build import build_cuda_runner
from engine.cuda.cuda_runner import CudaRunner
from engine.cuda.decode_graphs import DecodeGraphs
from engine.cuda.mask_buffer import MaskBuffer
from engine.cuda.prompt_graphs import without_graphs
from engine.kernels.linear import small_linear
from engine.model.attention import Caches
from engine.model.fp8_matrix import F8
from engine.model.weights import Weights
from engine.runners.step_shape import StepShape
from engine.runners.torch_runner import build_runner
from engine.sequences.batch import Batch, Runner
from engine.sequences.sequence import Sequence
from runtime.checkpoint.model_files import ModelFiles, resolve_model
from runtime.config.serving import EngineConfig
from runtime.device.drivers import memory_of
from runtime.grammar.compiler import GrammarCompiler
from tests.engine.drafts.guesses import Guesses
from tests.engine.engine_runs import run, sequences, small_engine
from tests.engine.prompt_logprobs import assert_engine_scores
from tests.tiny_families import LONG, write_family
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_LAYERS = 2 if DEVICE.type == "cuda" else 1  # the second one repeats launches; the interpreter has none to repeat
NUM_BLOCKS, BLOCK_SIZE = 40, 16
MAX_BATCH_TOKENS, MAX_RUNNING = 48, 6
LETTERS = Grammar("regex", "[a-e]{10,60}")


@pytest.fixture(autouse=True)
def few_large_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's time goes by programs, whatever their size."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(small_linear, "TILE", 1 << 16)
        monkeypatch.setattr(small_linear, "MIN_PROGRAMS", 1)


def write_model(tmp_path_factory: pytest.TempPathFactory, architecture: str) -> ModelFiles:
    folder = tmp_path_factory.mktemp(architecture)
    return resolve_model(str(write_tiny_model(folder, architecture=architecture, num_hidden_layers=NUM_LAYERS)))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return write_model(tmp_path_factory, "llama")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return write_model(tmp_path_factory, "qwen3")


def slab(
    files: ModelFiles, device: torch.device, stale: float = float("nan"), dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    config = files.config
    shape = (config.num_layers, NUM_BLOCKS, config.num_kv_heads, 2, BLOCK_SIZE, config.head_dim)
    return torch.full(shape, stale, device=device).to(dtype)


def caches(files: ModelFiles, num_window_blocks: int, kv_dtype: torch.dtype) -> Caches:
    """Stale but for the place of blocks that have none."""
    whole = slab(files, DEVICE, dtype=kv_dtype)
    if not num_window_blocks:
        return whole
    each = [cache[: num_window_blocks if files.config.window(layer) else None] for layer, cache in enumerate(whole)]
    for cache in each:
        cache[NOWHERE] = 0
    return each


def cuda_runner(
    files: ModelFiles,
    max_batch_tokens: int = MAX_BATCH_TOKENS,
    kv_dtype: torch.dtype = torch.float32,
    num_window_blocks: int = 0,
) -> CudaRunner:
    runner = build_cuda_runner(
        files.config,
        Weights(files.folder, torch.float32, memory_of(DEVICE)),
        caches(files, num_window_blocks, kv_dtype),
        files.eos_token_ids,
        max_batch_tokens=max_batch_tokens,
        max_running=MAX_RUNNING,
        max_model_len=512,
        flash=False,
    )
    runner.capture()
    return runner


class Replayed:
    """A GraphRecorder of a device without CUDA graphs."""

    record = staticmethod(without_graphs)

    def __enter__(self) -> "Replayed":
        return self

    def __exit__(self, *_: object) -> None: ...


def replay(runner: CudaRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes run padded, in the places of a graph's inputs, as on a GPU."""
    monkeypatch.setattr(decode_graphs, "GraphRecorder", Replayed)
    runner._logits = torch.full((MAX_RUNNING, len(runner._model.vocabulary)), float("nan"))
    with torch.inference_mode():
        runner._graphs = DecodeGraphs(MAX_RUNNING, runner._clear, runner._run_padded)


def engine(files: ModelFiles, runner: Runner, num_blocks: int = NUM_BLOCKS, num_window_blocks: int = 0) -> Engine:
    return small_engine(files, runner, num_blocks, MAX_BATCH_TOKENS, MAX_RUNNING, num_window_blocks=num_window_blocks)


def both(
    files: ModelFiles,
    params: list[SamplingParams],
    seed: int,
    num_blocks: int = NUM_BLOCKS,
    grammars: GrammarCompiler | None = None,
    kv_dtype: torch.dtype = torch.float32,
    num_window_blocks: int = 0,
) -> None:
    """num_window_blocks: of the GPU's runner; torch's has one group."""
    torch_slab = slab(files, torch.device("cpu"), 3.0, kv_dtype)  # it multiplies what is stale by zero
    torch_runner = build_runner(
        files, EngineConfig(device="cpu", attention="torch"), torch_slab, Weights(files.folder, torch.float32)
    )
    expected = run(engine(files, torch_runner, num_blocks), sequences(params, seed, grammars))
    runner = cuda_runner(files, kv_dtype=kv_dtype, num_window_blocks=num_window_blocks)
    pressed = engine(files, runner, num_blocks, num_window_blocks)
    assert run(pressed, sequences(params, seed, grammars)) == expected
    assert (pressed.scheduler.num_preemptions > 0) == (num_blocks < NUM_BLOCKS)
    assert sum(len(set(tokens)) for tokens in expected.values()) > 12, "the test says nothing when models repeat"


SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"] * (2 if DEVICE.type == "cuda" else 1)}
UNLIKE: dict[str, dict[str, Any]] = {
    "mistral, windows": {},
    "ministral": SLIDING_AND_FULL,
    "ministral3": {},
    "phi3, windows and part of a head rotated": {},
    "smollm3": {},
    "olmo3": SLIDING_AND_FULL,
    "gemma2": SLIDING_AND_FULL,
    "gemma3": SLIDING_AND_FULL,
    "gpt-oss": SLIDING_AND_FULL,
}
LONG_OF_96 = LONG | {name: LONG[name] * 6 for name in ("short_factor", "long_factor")}  # as Phi-3-mini-128k has
NARROW: dict[str, dict[str, Any]] = {
    "phi3, longrope": {"head_dim": 96, "hidden_size": 192, "num_attention_heads": 2, "rope_parameters": LONG_OF_96},
    "phi3, windows and part of a head rotated": {"head_dim": 80},
    "qwen3, windows": {"head_dim": 96, "max_window_layers": 0},
}
MIXED = [SamplingParams(max_tokens=6, seed=i, temperature=(0.0, 0.8)[i // 2 % 2]) for i in range(5)]


@pytest.mark.parametrize("model", ["files", "qwen3"], ids=["llama", "qwen3"])
def test_greedy_and_seeded_sequences_in_mixed_batches(model: str, request: pytest.FixtureRequest) -> None:
    """Architectures are tried here. What the other tests are about begins behind the model, at its logits."""
    both(request.getfixturevalue(model), MIXED, seed=1)


def test_keys_and_values_in_8_bits(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        convert = interpreter._convert_float

        def rounded(values: np.ndarray, was: Any, becomes: Any, mode: Any) -> np.ndarray:
            """The interpreter's own loses carries."""
            if becomes.primitive_bitwidth > 8:
                return np.asarray(convert(values, was, becomes, mode))
            return torch.from_numpy(values).to(F8).view(torch.uint8).numpy()

        monkeypatch.setattr(interpreter, "_convert_float", rounded)
    both(files, MIXED, seed=1, kv_dtype=F8)


@pytest.mark.parametrize("family", ["qwen2", "granite", "olmo2", "mixtral", "qwen3moe"])
def test_families_whose_layers_attend_alike(family: str, tmp_path: Path) -> None:
    both(resolve_model(str(write_family(tmp_path, family, num_hidden_layers=NUM_LAYERS))), MIXED, seed=1)


@pytest.mark.parametrize(("family", "num_window_blocks"), [*((family, 16) for family in UNLIKE), ("gemma3", 0)])
def test_families_with_windows_soft_caps_sinks_and_rotations_of_their_own(
    family: str, num_window_blocks: int, tmp_path: Path
) -> None:
    """Prompts and decodes are longer than the windows, of which all but one family's give their blocks back."""
    keys = {"num_hidden_layers": 4 if DEVICE.type == "cuda" else 2, **UNLIKE[family]}
    files = resolve_model(str(write_family(tmp_path, family, **keys)))
    both(files, MIXED, seed=1, num_window_blocks=num_window_blocks if files.config.windows else 0)


@pytest.mark.parametrize("family", NARROW)
def test_heads_whose_size_is_no_power_of_two(family: str, tmp_path: Path) -> None:
    keys = {"num_hidden_layers": NUM_LAYERS, **NARROW[family]}
    both(resolve_model(str(write_family(tmp_path, family, **keys))), MIXED, seed=1)


def test_sampling_that_the_kernel_does_not_know(files: ModelFiles) -> None:
    params = [
        SamplingParams(max_tokens=6, seed=1, temperature=0.8, top_p=0.9),
        SamplingParams(max_tokens=6, seed=2, temperature=0.8),
        SamplingParams(max_tokens=6, seed=3, temperature=0.9, frequency_penalty=1.5, repetition_penalty=1.2),
        SamplingParams(max_tokens=6, seed=4, temperature=0.0, min_tokens=4),
        SamplingParams(max_tokens=6, seed=5, temperature=0.0, logprobs=2),
    ]
    both(files, params, seed=2)


def test_masks_beside_what_kernel_and_sampler_draw(files: ModelFiles) -> None:
    words = {"bad_words": ("x",), "bad_word_ids": ((77,), (30, 40), (40, 30))}
    params = [
        SamplingParams(max_tokens=5, seed=6, temperature=1.5, min_tokens=2, allowed_token_ids=(30, 40, 77), **words),
        SamplingParams(max_tokens=7, seed=1, temperature=0.0, grammar=LETTERS),
        SamplingParams(max_tokens=4, seed=2, temperature=0.8),
        SamplingParams(max_tokens=7, seed=3, temperature=0.9, grammar=LETTERS),
        SamplingParams(max_tokens=6, seed=4, temperature=0.9, top_p=0.9, frequency_penalty=1.0, grammar=LETTERS),
        SamplingParams(max_tokens=6, seed=5, temperature=1.5, min_tokens=6, grammar=Grammar("regex", "[xyz]{2,6}")),
    ]
    grammars = GrammarCompiler(files.folder, files.config.vocab_size, files.eos_token_ids)
    both(files, params, seed=3, grammars=grammars)


def test_a_sequence_with_a_grammar_is_in_every_step(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step is on its way before the mask of the one before is known."""
    grammars = GrammarCompiler(files.folder, files.config.vocab_size, files.eos_token_ids)
    news, tokens = list[str](), list[int]()
    fill = MaskBuffer.fill
    monkeypatch.setattr(MaskBuffer, "fill", lambda *given: (news.append("mask"), fill(*given)))
    ours = engine(files, cuda_runner(files))
    ours.add(sequences([SamplingParams(max_tokens=5, seed=1, grammar=LETTERS)], 1, grammars)[0])
    while ours.has_work:
        tokens.append(len(ours.step().outputs))
    assert tokens[-6:] == [0, 1, 1, 1, 1, 1], "a token with each step but the first"
    assert news == ["mask"] * 5


def test_a_mask_that_fails_ends_its_step_and_no_other(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = GrammarCompiler(files.folder, files.config.vocab_size, files.eos_token_ids)
    params = [SamplingParams(max_tokens=4, seed=1, grammar=LETTERS)]
    ours = engine(files, cuda_runner(files))
    with monkeypatch.context() as patch:
        patch.setattr(MaskBuffer, "fill", lambda *_: 1 / 0)
        ours.add(sequences(params, 1, grammars)[0])
        ends = [one for _ in range(4) for one in ours.step().outputs]
    assert [one.error for one in ends] == ["the step failed: ZeroDivisionError: division by zero"]
    assert ours.check_integrity() == []
    assert len(run(ours, sequences(params, 1, grammars))["r0"]) == 4


def test_preemption_under_a_small_pool(files: ModelFiles) -> None:
    params = [SamplingParams(max_tokens=6, seed=i, temperature=0.7, ignore_eos=True) for i in range(3)]
    both(files, params, seed=5, num_blocks=5)


def test_log_probabilities_of_prompts(files: ModelFiles) -> None:
    """Chunks of prompts beside each other and beside decodes."""
    asking = SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=2)
    drawing = SamplingParams(max_tokens=6, seed=1, temperature=0.8, top_p=0.9, ignore_eos=True)
    assert_engine_scores(
        files.folder, engine(files, cuda_runner(files)), sequences([asking, drawing, asking, asking], seed=6)
    )


def test_the_device_is_waited_for_after_each_prompt_of_the_warm_up(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers of the host take turns: a third prompt would be written over the first one on its way."""
    runner = cuda_runner(files, max_batch_tokens=256)
    done: list[str] = []
    monkeypatch.setattr(runner, "submit", lambda batch: done.append("prompt"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))
    runner._warm_up()
    assert done == ["prompt", "wait"] * 4  # of 32 to 256 tokens


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # rows of padding hold anything
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_drafts_are_verified_beside_prompts_and_decodes(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside prompts they are chunks to attention, else rows that see each other. What the kernel does not sample has
    no drafts."""
    keys = {"num_hidden_layers": 4 if DEVICE.type == "cuda" else 2, **UNLIKE.get(family, {})}
    files = resolve_model(str(write_family(tmp_path, family, **keys)))
    params = [*MIXED, SamplingParams(max_tokens=6, seed=9, temperature=0.8, top_p=0.9)]
    torch_slab = slab(files, torch.device("cpu"), stale=3.0)
    torch_runner = build_runner(
        files, EngineConfig(device="cpu", attention="torch"), torch_slab, Weights(files.folder, torch_slab.dtype)
    )
    expected = run(engine(files, torch_runner), sequences(params, seed=1))

    def answer(sequence: Sequence, most: int) -> list[int]:
        return expected[sequence.request_id][sequence.next_position :][:most]

    places = 16 if files.config.windows else 0
    runner = cuda_runner(files, num_window_blocks=places)
    pack, as_rows = runner._buffer.pack, set[bool]()

    def watched(batch: Batch, shape: StepShape, sampled: dict[Sequence, int]) -> torch.Tensor:
        if batch.drafted:
            as_rows.add(shape.drafts)
        return pack(batch, shape, sampled)

    monkeypatch.setattr(runner._buffer, "pack", watched)
    if DEVICE.type == "cpu":
        replay(runner, monkeypatch)
    replays, replayed = DecodeGraphs.replay, set[bool]()

    def noted(graphs: DecodeGraphs, size: int, *, drafts: bool) -> None:
        replayed.add(drafts)
        replays(graphs, size, drafts=drafts)

    monkeypatch.setattr(DecodeGraphs, "replay", noted)
    drafter = Guesses(answer, right=0.7)
    guessed = small_engine(files, runner, NUM_BLOCKS, MAX_BATCH_TOKENS, MAX_RUNNING, drafter, num_window_blocks=places)
    assert run(guessed, sequences(params, seed=1)) == expected
    assert 0 < guessed.speculation.num_accepted < guessed.speculation.num_drafted
    assert as_rows == replayed == {False, True}
