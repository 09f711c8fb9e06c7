"""The GPU's runner on two ranks, in Triton's interpreter: what it tells the other rank is all that one needs."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton_proto.grammar import Grammar
from baton_proto.sampling import SamplingParams
from engine.kernels.linear import small_linear
from engine.ranks.rank_commands import Load
from engine.ranks.ranks import Ranks
from engine.ranks.tensor_parallel import TensorParallelModel, led_by
from runtime.checkpoint.model_files import ModelFiles, resolve_model
from runtime.config.serving import EngineConfig
from runtime.grammar.compiler import GrammarCompiler
from tests.engine.engine_runs import run, sequences, small_engine
from tests.engine.interpreted_rank import FEW_LARGE_PROGRAMS, NUM_BLOCKS, interpreted_part
from tests.engine.prompt_logprobs import assert_engine_scores
from tests.service import assert_gone
from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[3]
PARAMS = [
    SamplingParams(max_tokens=6, seed=1, temperature=0.0),
    SamplingParams(max_tokens=6, seed=2, temperature=0.8),
    SamplingParams(max_tokens=6, seed=3, temperature=0.8, top_p=0.9),
    SamplingParams(max_tokens=6, seed=4, temperature=0.0, logprobs=2),
    SamplingParams(max_tokens=6, seed=5, temperature=0.8, grammar=Grammar("regex", "[a-z0-9 ]{6,20}")),
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """With a vocabulary whose shares differ. Qwen3 has all that Llama has, and norms of heads."""
    folder = tmp_path_factory.mktemp("qwen3")
    write_tiny_model(folder, architecture="qwen3", num_hidden_layers=1, vocab_size=515, tie_word_embeddings=True)
    return resolve_model(str(folder))


def config(size: int) -> EngineConfig:
    return EngineConfig(max_batch_tokens=48, max_running=6, tensor_parallel=size)


@contextlib.contextmanager
def loaded(files: ModelFiles, size: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[TensorParallelModel]:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'proto'}")
    ranks = Ranks(size, print, "tests.engine.interpreted_rank")
    load = Load(str(ranks.meeting), str(files.folder), files.config, files.eos_token_ids, config(size))
    try:
        sequence = ranks.tell(load)
        own = interpreted_part(load, 0)
        ranks.wait_done(sequence, timeout_s=60)
        yield led_by(own, ranks)
    finally:
        ranks.close()
        assert_gone(ranks.pids)


def test_two_ranks_sample_what_one_does(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, drawn by the kernel, with and without a mask, and drawn on the host, in mixed batches."""
    monkeypatch.setattr(small_linear, "TILE", FEW_LARGE_PROGRAMS[0])
    monkeypatch.setattr(small_linear, "MIN_PROGRAMS", FEW_LARGE_PROGRAMS[1])
    alone = interpreted_part(Load("", str(files.folder), files.config, files.eos_token_ids, config(1)), 0)
    grammars = GrammarCompiler(files.folder, files.config.vocab_size, files.eos_token_ids)
    expected = run(small_engine(files, alone.runner, NUM_BLOCKS, 48, 6), sequences(PARAMS, 1, grammars))
    assert sum(len(set(tokens)) for tokens in expected.values()) > 12, "the test says nothing when the model repeats"
    with loaded(files, 2, monkeypatch) as model:
        engine = small_engine(files, model.runner, NUM_BLOCKS, 48, 6)
        assert run(engine, sequences(PARAMS, 1, grammars)) == expected
        asking = [SamplingParams(max_tokens=2, seed=1, top_p=0.9, prompt_logprobs=k) for k in (2, None, 0)]
        assert_engine_scores(files.folder, small_engine(files, model.runner, NUM_BLOCKS, 48, 6), sequences(asking, 3))
