"""A tiny model says the same with drafts as without, whatever its sampling asks for."""

from typing import Any

import pytest

from baton_proto.grammar import Grammar
from baton_proto.sampling import SamplingParams, TokenLogprobs
from engine.core.engine import Engine
from engine.drafts import speculation
from engine.drafts.drafter import Drafter
from engine.drafts.ngrams import NgramDrafter
from engine.loading.loaded_model import load_model
from engine.sequences.sequence import Sequence
from runtime.checkpoint.model_files import ModelFiles
from runtime.config.serving import EngineConfig
from runtime.grammar.compiler import GrammarCompiler
from tests.engine.drafts.guesses import Guesses
from tests.engine.engine_runs import outputs, sequences, small_engine

ROOMY, PRESSED = 64, 9  # blocks
LETTERS = Grammar("regex", "[a-e]{10,30}")
LATE = Grammar("regex", "[abc]{20}" + r"[\w-]{1,200}" * 60)  # its second part is more than a step may take
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"temperature": 0.9, "frequency_penalty": 1.5, "presence_penalty": 0.2, "repetition_penalty": 1.2},
    {"temperature": 0.0, "min_tokens": 20, "stop_token_ids": tuple(range(3, 40))},
    {"temperature": 0.7, "stop_token_ids": tuple(range(40, 60))},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.8, "bad_words": ("x",), "bad_word_ids": ((77,), (30, 40), (40, 30))},
    {"temperature": 0.9, "allowed_token_ids": tuple(range(100, 140)), "logit_bias": {101: 3.0}},
    {"temperature": 0.8, "grammar": LETTERS},
    {"temperature": 0.0, "grammar": LETTERS, "ignore_eos": True},
]
Told = tuple[list[int], list[TokenLogprobs], str, int | None]


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "TRIAL", 1e6)
    monkeypatch.setattr(speculation, "FULL", 1e6)


def tiny_engine(files: ModelFiles, num_blocks: int, drafter: Drafter | None = None) -> Engine:
    model = load_model(files, EngineConfig(device="cpu", kv_memory="4MiB", block_size=16))
    return small_engine(files, model.runner, num_blocks, 48, 6, drafter)


def told_by(engine: Engine, work: list[Sequence]) -> dict[str, Told]:
    told: dict[str, Told] = {sequence.request_id: ([], [], "", None) for sequence in work}
    for output in outputs(engine, work, 2000):
        tokens, logprobs, _, _ = told[output.sequence.request_id]
        end = output.finish or "", output.stop_token
        told[output.sequence.request_id] = (tokens + output.token_ids, logprobs + output.logprobs, *end)
    return told


def work(grammars: GrammarCompiler) -> list[Sequence]:
    return sequences([SamplingParams(max_tokens=40, seed=i, **asked) for i, asked in enumerate(ASKED)], 1, grammars)


def assert_same(told: dict[str, Told], expected: dict[str, Told]) -> None:
    for name, (tokens, logprobs, *end) in expected.items():
        own_tokens, own_logprobs, *own_end = told[name]
        assert (own_tokens, own_end) == (tokens, end), name
        for own, other in zip(own_logprobs, logprobs, strict=True):
            assert own.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in own.top] == [token for token, _ in other.top]


@pytest.fixture(scope="module")
def expected(files: ModelFiles, grammars: GrammarCompiler) -> dict[str, Told]:
    return told_by(tiny_engine(files, ROOMY), work(grammars))


@pytest.mark.parametrize("num_blocks", [ROOMY, PRESSED], ids=["roomy", "pressed"])
@pytest.mark.parametrize("right", [1.0, 0.7])
def test_guesses_change_no_answer(
    files: ModelFiles, grammars: GrammarCompiler, expected: dict[str, Told], right: float, num_blocks: int
) -> None:
    def answer(sequence: Sequence, most: int) -> list[int]:
        known = sequence.next_position
        return expected[sequence.request_id][0][known : known + most]

    engine = tiny_engine(files, num_blocks, Guesses(answer, right))
    assert_same(told_by(engine, work(grammars)), expected)
    assert (engine.scheduler.num_preemptions > 0) == (num_blocks == PRESSED)
    assert engine.speculation.num_accepted > 50
    assert (engine.speculation.num_accepted == engine.speculation.num_drafted) == (right == 1.0)


def test_ngrams_change_no_answer(files: ModelFiles, grammars: GrammarCompiler, expected: dict[str, Told]) -> None:
    engine = tiny_engine(files, ROOMY, NgramDrafter())
    assert_same(told_by(engine, work(grammars)), expected)
    assert engine.speculation.num_drafted > 0


def test_what_a_grammar_allowed_before_it_failed_is_told(files: ModelFiles, grammars: GrammarCompiler) -> None:
    """The failure is met by a guess's row, behind rows that are right."""
    wanted = [SamplingParams(max_tokens=40, seed=1, temperature=0.0, grammar=LATE)]
    expected = told_by(tiny_engine(files, ROOMY), sequences(wanted, 1, grammars))
    tokens = expected["r0"][0]
    drafter = Guesses(lambda sequence, most: (tokens + [99] * 40)[sequence.next_position :][:most], 1.0)
    engine = tiny_engine(files, ROOMY, drafter)
    assert_same(told_by(engine, sequences(wanted, 1, grammars)), expected)
    assert expected["r0"][2] == "error"
    assert engine.speculation.num_accepted > 0
