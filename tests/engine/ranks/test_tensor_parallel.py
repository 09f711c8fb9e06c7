"""Ranks in processes of their own, on CPU: tokens and KV are those of one rank, and a lost one ends the engine."""

import contextlib
import itertools
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton_proto.sampling import SamplingParams
from engine.core.engine import Engine
from engine.loading.loaded_model import LoadedModel, load_model
from engine.model.shard import shard_of
from engine.ranks import ranks as ranks_module
from engine.ranks.rank_commands import ExportSlab
from engine.ranks.ranks import Ranks
from engine.ranks.tensor_parallel import TensorParallelModel, load_tensor_parallel
from engine.sequences.sequence import Sequence
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import layers_of
from runtime.checkpoint.model_files import ModelFiles, resolve_model
from runtime.config.serving import EngineConfig
from runtime.errors import ConfigError, ModelError, RankLostError
from tests.engine.drafts.guesses import Guesses
from tests.engine.engine_runs import run, sequences, small_engine
from tests.engine.prompt_logprobs import assert_engine_scores
from tests.freezing import freeze
from tests.open_files import open_files
from tests.service import assert_gone
from tests.tiny_families import write_family
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
NUM_BLOCKS = 40
PRESSED_BLOCKS = 8
NUM_PLACES = 9  # of blocks in layers with a window; with fewer, sequences wait and none is preempted
SHAPES = {
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 8},
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "two_kv_heads": {"num_attention_heads": 8, "num_key_value_heads": 2},
}
# Whose tensors and sums are divided in other ways.
FAMILIES = ["qwen2", "phi3, windows and part of a head rotated", "granite", "olmo3", "gemma3", "qwen3moe", "gpt-oss"]


@pytest.fixture(scope="module", params=SHAPES)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    if request.param in FAMILIES:
        kv_heads = 2 if request.param == "olmo3" else 4
        shape = {"num_attention_heads": 8, "num_key_value_heads": kv_heads}
        return resolve_model(str(write_family(tmp_path_factory.mktemp("family"), request.param, **shape)))
    architecture = "qwen3" if request.param == "qwen3" else "llama"
    folder = write_tiny_model(
        tmp_path_factory.mktemp(request.param), architecture=architecture, num_hidden_layers=2, **SHAPES[request.param]
    )
    return resolve_model(str(folder))


@pytest.fixture(scope="module")
def pair(files: ModelFiles) -> Iterator[TensorParallelModel]:
    """Two ranks for all tests that leave them as they are."""
    with loaded(files, 2) as model:
        yield model


def config(tensor_parallel: int) -> EngineConfig:
    return EngineConfig(device="cpu", kv_memory="3MiB", threads=1, tensor_parallel=tensor_parallel)


@dataclass
class Lost:
    """What `on_lost` was told."""

    error: RankLostError | None = None

    def __post_init__(self) -> None:
        self.happened = threading.Event()

    def __call__(self, error: RankLostError) -> None:
        self.error = error
        self.happened.set()


@contextlib.contextmanager
def loaded(files: ModelFiles, size: int, on_lost: Lost | None = None) -> Iterator[TensorParallelModel]:
    model = load_tensor_parallel(files, config(size), on_lost or Lost())
    try:
        yield model
    finally:
        pids = model.ranks.pids
        model.close()
        assert_gone(pids)


def engine(files: ModelFiles, model: LoadedModel | TensorParallelModel, num_blocks: int = NUM_BLOCKS) -> Engine:
    places = NUM_PLACES if model.slab.layout.window_layers else 0
    return small_engine(files, model.runner, num_blocks, 48, 6, num_window_blocks=places)


def greedy(count: int, max_tokens: int = 24) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True) for _ in range(count)]


def slab_of(pid: int, layout: SlabLayout) -> list[Tensor]:
    """Of another rank, through its descriptor: float32 [blocks, kv_heads, 2, block_size, head_dim] of each layer."""
    links = Path(f"/proc/{pid}/fd").iterdir()
    path = next(link for link in links if re.match("/memfd:baton-(?!commands)", os.readlink(link)))
    with path.open("r+b") as file:
        mapping = mmap.mmap(file.fileno(), layout.nbytes)
    return layers_of(torch.frombuffer(mapping, dtype=torch.float32), layout)


def slabs_of(model: TensorParallelModel) -> list[list[Tensor]]:
    """What each rank has."""
    return [model.slab.layers, *(slab_of(pid, model.slab.layout) for pid in model.ranks.pids)]


def until_followed(model: TensorParallelModel) -> None:
    """The other ranks have done all that they were told."""
    model.ranks.wait_done(model.ranks.tell(ExportSlab()), timeout_s=60)


def answers_and_kv(files: ModelFiles, num_blocks: int) -> tuple[dict[str, list[int]], list[Tensor]]:
    """Of one rank."""
    model = load_model(files, config(1))
    alone = engine(files, model, num_blocks)
    answers = run(alone, sequences(greedy(5), seed=1))
    assert (alone.scheduler.num_preemptions > 0) == (num_blocks == PRESSED_BLOCKS)
    assert sum(len(set(tokens)) for tokens in answers.values()) > 12, "the test says nothing when the model repeats"
    return answers, model.slab.layers


def assert_those_of_one(files: ModelFiles, model: TensorParallelModel, num_blocks: int) -> None:
    """Prompts that share a prefix arrive one by one and are chunked beside decodes."""
    expected, whole = answers_and_kv(files, num_blocks)
    slabs, layout = slabs_of(model), model.slab.layout
    assert bool(layout.window_layers) == any(files.config.windows)
    for layer in itertools.chain(*slabs):
        layer.zero_()  # another test may have left something
    assert run(engine(files, model, num_blocks), sequences(greedy(5), seed=1)) == expected
    until_followed(model)
    for rank, slab in enumerate(slabs):
        heads = shard_of(files.config, rank, len(slabs)).kv_heads
        for number, (here, there) in enumerate(zip(slab, whole, strict=True)):
            used = NUM_PLACES if number in layout.window_layers else num_blocks
            here, there = here[:used], there[:used, heads.start : heads.stop]
            rounding = 1e-5 * float(there.abs().max())  # sums are split, and each kind of CPU adds up in its own order
            torch.testing.assert_close(here, there, rtol=0.0, atol=rounding)
            assert here.abs().sum() > 10, "the layer holds something"


@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS, PRESSED_BLOCKS], ids=["2-roomy", "2-preempted"])
def test_tokens_and_kv_of_all_ranks_are_those_of_one(
    files: ModelFiles, pair: TensorParallelModel, num_blocks: int
) -> None:
    assert_those_of_one(files, pair, num_blocks)


@pytest.mark.parametrize("files", FAMILIES, indirect=True)
def test_tokens_and_kv_of_both_ranks_of_a_family_are_those_of_one(files: ModelFiles) -> None:
    with loaded(files, 2) as model:
        assert_those_of_one(files, model, PRESSED_BLOCKS)


@pytest.mark.parametrize("files", ["llama", "two_kv_heads", "olmo3"], indirect=True)
def test_tokens_and_kv_of_four_ranks_are_those_of_one(files: ModelFiles) -> None:
    """With KV heads for each, and with a head that two share. What qwen3 adds is in each head: two ranks show it."""
    with loaded(files, 4) as model:
        assert_those_of_one(files, model, PRESSED_BLOCKS)


def test_sampling_of_every_kind_is_that_of_one_rank(files: ModelFiles, pair: TensorParallelModel) -> None:
    params = [
        SamplingParams(max_tokens=6, seed=1, temperature=0.8, top_p=0.9),
        SamplingParams(max_tokens=6, seed=2, temperature=0.8),
        SamplingParams(max_tokens=6, seed=3, temperature=0.9, frequency_penalty=1.5, repetition_penalty=1.2),
        SamplingParams(max_tokens=6, seed=5, temperature=0.0, logprobs=2),
    ]
    expected = run(small_engine(files, load_model(files, config(1)).runner, NUM_BLOCKS, 48, 6), sequences(params, 2))
    assert run(engine(files, pair), sequences(params, 2)) == expected

    def answer(sequence: Sequence, most: int) -> list[int]:
        return expected[sequence.request_id][sequence.next_position :][:most]

    guessed = small_engine(files, pair.runner, NUM_BLOCKS, 48, 6, Guesses(answer, right=0.7))
    assert run(guessed, sequences(params, 2)) == expected
    assert 0 < guessed.speculation.num_accepted < guessed.speculation.num_drafted


def test_log_probabilities_of_prompts(files: ModelFiles, pair: TensorParallelModel) -> None:
    params = [SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=k) for k in (2, None, 0)]
    assert_engine_scores(files.folder, engine(files, pair), sequences(params, seed=3))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return resolve_model(str(write_tiny_model(tmp_path_factory.mktemp("llama"))))


def test_several_engines_share_a_host(llama: ModelFiles) -> None:
    with loaded(llama, 2) as one, loaded(llama, 2) as other:
        ours, theirs = (run(engine(llama, model), sequences(greedy(2), seed=1)) for model in (one, other))
        assert ours == theirs
    assert not set(one.ranks.pids) & set(other.ranks.pids)


def test_a_killed_rank_is_noticed_at_once_and_ends_the_engine(llama: ModelFiles) -> None:
    lost = Lost()
    with loaded(llama, 2, lost) as model:
        own = engine(llama, model)
        for sequence in sequences(greedy(2), seed=1):
            own.add(sequence)
        own.step()
        (pid,) = model.ranks.pids
        os.kill(pid, signal.SIGKILL)
        assert lost.happened.wait(30), "long before it counts as hanging"
        told = rf"tensor-parallel rank 1 \(pid {pid}\) was ended by SIGKILL"
        assert lost.error is not None
        with pytest.raises(RankLostError, match=told):
            raise lost.error
        with pytest.raises(RankLostError, match=told):
            own.step()


LEADING = """
import sys
from runtime.checkpoint.model_files import resolve_model
from engine.ranks.tensor_parallel import load_tensor_parallel
from tests.engine.ranks.test_tensor_parallel import config

model = load_tensor_parallel(resolve_model(sys.argv[1]), config(4))
print(*model.ranks.pids, flush=True)
sys.stdin.read()
"""


def test_ranks_end_with_the_process_that_leads_them(llama: ModelFiles) -> None:
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADING, str(llama.folder)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with leader:
        assert leader.stdout is not None
        pids = [int(pid) for pid in leader.stdout.readline().split()]
        assert len(pids) == 3
        leader.kill()
        leader.wait()
        assert_gone(pids)


def test_a_rank_that_stands_still_counts_as_lost(llama: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "HANG_LIMIT_S", 2.0)
    monkeypatch.setattr(ranks_module, "_CHECK_INTERVAL_S", 0.05)
    lost = Lost()
    with loaded(llama, 2, lost) as model:
        own = engine(llama, model)
        run(own, sequences(greedy(2), seed=1))
        assert not lost.happened.wait(2.5), "a rank that has nothing to do does not hang"
        freeze(model.ranks.pids[0])
        own.add(sequences(greedy(1), seed=2)[0])
        failures: list[Exception] = []

        def step() -> None:
            try:
                own.step()
            except RankLostError as error:
                failures.append(error)

        stuck = threading.Thread(target=step)
        stuck.start()
        assert lost.happened.wait(30)
        assert "has not answered for " in str(lost.error)
        os.kill(model.ranks.pids[0], signal.SIGKILL)
        stuck.join(10)
        assert "was ended by SIGKILL" in str(failures[0])


def test_a_step_that_fails_on_rank_0_alone_is_the_last_one(llama: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded(llama, 2) as model:
        monkeypatch.setattr(model.own.runner, "_sampler", None)
        own = engine(llama, model)
        own.add(sequences(greedy(1), seed=1)[0])
        with pytest.raises(RankLostError, match=r"rank 0 .* failed in a step that the others are in"):
            own.step()


def test_a_model_that_cannot_be_loaded_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = resolve_model(str(write_tiny_model(tmp_path)))
    (tmp_path / "model.safetensors").unlink()
    started: list[Ranks] = []
    monkeypatch.setattr("engine.ranks.tensor_parallel.Ranks", lambda *a: started.append(Ranks(*a)) or started[-1])
    with pytest.raises((ModelError, RankLostError)):
        load_tensor_parallel(files, config(2), Lost())
    assert_gone(started[0].pids)


def test_ranks_leave_no_descriptor_and_no_file_behind(
    llama: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with loaded(llama, 2):
        pass
    before = open_files()
    with loaded(llama, 2):
        assert list(tmp_path.iterdir())
    assert open_files() <= before
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_be_divided_starts_nothing(llama: ModelFiles) -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel: 4 attention heads"):
        load_tensor_parallel(llama, config(8), Lost())
