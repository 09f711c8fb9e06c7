"""The runner against transformers' own greedy generation, on batches made by hand."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from baton_proto.sampling import SamplingParams
from engine.loading.loaded_model import load_model
from engine.runners.auto import resolve_device
from engine.runners.torch_runner import slab_layout
from engine.sequences.batch import Batch
from engine.sequences.sequence import Sequence
from runtime.checkpoint.model_files import ModelFiles, resolve_model
from runtime.config.serving import EngineConfig
from runtime.errors import ConfigError, ModelError
from tests.engine.engine_runs import run, small_engine
from tests.engine.runner_bench import STALE, RunnerBench
from tests.tiny_families import write_family
from tests.tiny_model import VOCAB_SIZE, write_tiny_model

CONFIG = EngineConfig(device="cpu", kv_memory="4MiB")
MAX_TOKENS = 24


# With all that layers of families differ in; tests/engine/model/families/test_families.py has every one.
FAMILIES = [
    "phi3, windows and part of a head rotated",
    "smollm3",
    "granite",
    "olmo3",
    "gemma2",
    "gemma3",
    "mixtral",
    "gpt-oss",
]


WINDOWS = ["qwen2, windows of the upper layers", "mistral, windows", "olmo3", "gemma2", "gemma3", "gpt-oss"]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return written(tmp_path_factory, request.param)


def written(tmp_path_factory: pytest.TempPathFactory, name: str) -> ModelFiles:
    folder = tmp_path_factory.mktemp("model")
    if name in FAMILIES + WINDOWS:
        return resolve_model(str(write_family(folder, name)))
    return resolve_model(str(write_tiny_model(folder, architecture=name)))


@pytest.fixture(scope="module")
def reference(files: ModelFiles) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(files.folder, dtype=torch.float32).eval()


def prompts(count: int, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    lengths = [1, 15, 16, 17, 33, 100] + [source.randint(2, 120) for _ in range(count - 6)]
    return [[source.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def expected(reference: Any, prompt: list[int]) -> list[int]:
    """transformers' greedy output, EOS ignored."""
    token_ids = torch.tensor([prompt])
    output = reference.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    ids: list[int] = output[0, len(prompt) :].tolist()
    return ids


@pytest.mark.parametrize("files", ["llama", "qwen3", *FAMILIES], indirect=True)
def test_greedy_output_equals_transformers_in_mixed_batches_of_chunks_and_decodes(
    files: ModelFiles, reference: Any
) -> None:
    block_size = 16 if files.config.architecture == "llama" else 32
    source = random.Random(block_size)
    bench = RunnerBench(files, EngineConfig(device="cpu", kv_memory="4MiB", block_size=block_size))
    sequences = [bench.sequence(prompt, MAX_TOKENS) for prompt in prompts(8, seed=block_size)]
    mixed = 0
    while unfinished := [s for s in sequences if len(s.token_ids) < s.num_prompt_tokens + MAX_TOKENS]:
        prefill, decode = [], []
        for sequence in source.sample(unfinished, k=source.randint(1, len(unfinished))):
            if sequence.num_computed_tokens < sequence.num_prompt_tokens:
                left = sequence.num_prompt_tokens - sequence.num_computed_tokens
                prefill.append((sequence, min(left, source.randint(1, 40))))
            else:
                decode.append(sequence)
        mixed += bool(prefill and decode)
        bench.step(prefill, decode)
    assert mixed > 3
    for sequence in sequences:
        prompt, output = sequence.token_ids[: sequence.num_prompt_tokens], sequence.output_token_ids
        assert output == expected(reference, prompt)
        assert len(set(output)) > 5, "the test says nothing when the model repeats itself"


def test_a_sequence_goes_on_from_blocks_that_another_one_filled(files: ModelFiles, reference: Any) -> None:
    bench = RunnerBench(files, CONFIG)
    prompt = prompts(6, seed=5)[-1]
    first = bench.sequence(prompt, MAX_TOKENS)
    bench.step([(first, len(prompt))], [])
    second = bench.sequence(prompt, MAX_TOKENS)
    second.block_table[:5] = first.block_table[:5]
    second.num_computed_tokens = 80
    bench.step([(second, 20)], [first])
    for _ in range(MAX_TOKENS - 1):
        bench.step([], [second])
    assert second.output_token_ids == expected(reference, prompt)


@pytest.mark.parametrize("files", WINDOWS, indirect=True)
def test_greedy_output_equals_transformers_where_layers_with_a_window_give_back_their_blocks(
    files: ModelFiles, reference: Any
) -> None:
    """In chunks, beside each other, preempted, and behind prefixes that are found again."""
    config = EngineConfig(device="cpu", kv_memory="192KiB", max_running=4, max_batch_tokens=48)
    loaded = load_model(files, config)
    layout = loaded.slab.layout
    assert 0 < layout.num_window_blocks < layout.num_blocks
    engine = small_engine(files, loaded.runner, layout.num_blocks, 48, 4, num_window_blocks=layout.num_window_blocks)
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    shared, found = prompts(6, seed=3)[-1], 0
    answers = {tuple(prompt): expected(reference, prompt) for prompt in (shared, shared[:70], *prompts(8, seed=4))}
    for attempt in range(2):
        work = [Sequence(f"{attempt} {n}", list(prompt), len(prompt), sampling) for n, prompt in enumerate(answers)]
        said = run(engine, work)
        assert [said[sequence.request_id] for sequence in work] == list(answers.values())
        found += sum(sequence.num_cached_tokens > 0 for sequence in work)
    assert found
    assert engine.scheduler.num_preemptions
    assert sum(len(set(output)) for output in answers.values()) > 5 * len(answers), "models that repeat say nothing"
    loaded.close()


def test_a_chunk_that_does_not_end_the_prompt_samples_nothing(files: ModelFiles) -> None:
    bench = RunnerBench(files, CONFIG)
    sequence = bench.sequence(list(range(3, 43)), 4)
    assert bench.step([(sequence, 17)], []) == []
    assert bench.step([(sequence, 6)], []) == []
    assert len(bench.step([(sequence, 17)], [])) == 1


def test_kv_is_in_the_slab_when_a_layer_is_reported(files: ModelFiles) -> None:
    bench = RunnerBench(files, CONFIG)
    sequence = bench.sequence(list(range(3, 43)), 4)
    written: list[list[bool]] = []

    def layer_done(layer: int) -> None:
        blocks = bench.slab[:, sequence.block_table[0]]
        written.append([bool((blocks[index] != STALE).all()) for index in range(bench.runner.num_layers)])

    bench.runner.submit(Batch(prefill=[bench._scheduled(sequence, 40)], decode=[]), layer_done)
    assert written == [[index <= layer for index in range(4)] for layer in range(4)]


def test_logprobs_come_back_with_the_sampled_rows(files: ModelFiles) -> None:
    bench = RunnerBench(files, CONFIG)
    plain, asking = bench.sequence([5, 6, 7], 4), bench.sequence([8, 9], 4, logprobs=3)
    first, second = bench.step([(plain, 3), (asking, 2)], [])
    assert first.logprobs is None
    assert second.logprobs is not None
    assert second.logprobs.top[0] == (second.token_id, pytest.approx(second.logprobs.logprob))


def test_the_slab_takes_the_memory_that_it_was_given(files: ModelFiles) -> None:
    layout = slab_layout(files, EngineConfig(device="cpu", kv_memory="1MiB", block_size=32))
    assert layout.shape == (4, 1024 * 1024 // (4 * 2 * 2 * 32 * 16 * 4), 2, 2, 32, 16)
    assert layout.dtype == "float32"
    auto = slab_layout(files, EngineConfig(device="cpu", dtype="bfloat16", kv_memory="auto"))
    assert (auto.dtype, auto.nbytes) == ("bfloat16", 512 << 20)
    with pytest.raises(ConfigError, match=r"1KiB is less than one KV block"):
        slab_layout(files, EngineConfig(device="cpu", kv_memory="1KiB"))


def test_a_backend_or_device_that_is_not_there_is_refused(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'triton' is not available on cpu"):
        load_model(files, EngineConfig(device="cpu", attention="triton"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="cuda is not available"):
        resolve_device(EngineConfig(device="cuda"))


def test_a_model_is_loaded_with_the_slab_that_its_configuration_gives(files: ModelFiles) -> None:
    loaded = load_model(files, EngineConfig(device="cpu", kv_memory="1MiB"))
    assert loaded.slab.layout.nbytes <= 1 << 20
    assert loaded.runner.num_layers == files.config.num_layers
    loaded.slab.close()


def test_threads_are_set_when_the_configuration_names_them(files: ModelFiles) -> None:
    before = torch.get_num_threads()
    try:
        RunnerBench(files, EngineConfig(device="cpu", kv_memory="1MiB", threads=before + 1))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_a_tensor_that_does_not_fit_the_config_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"num_hidden_layers": 4', '"num_hidden_layers": 5'))
    with pytest.raises(ModelError, match=r"tensor model\.layers\.4\.self_attn\.q_proj\.weight is missing"):
        RunnerBench(resolve_model(str(folder)), CONFIG)
