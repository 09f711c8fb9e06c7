"""Sequences with grammars in whole runs of an engine with a tiny model: preempted ones, and those that meet a limit."""

import pytest

from baton_proto.grammar import Grammar
from baton_proto.sampling import SamplingParams
from engine.core.engine import Engine
from engine.loading.loaded_model import load_model
from runtime.checkpoint.model_files import ModelFiles
from runtime.config.serving import EngineConfig
from runtime.grammar.compiler import GrammarCompiler
from tests.engine.engine_runs import run, sequences, small_engine

ROOMY, PRESSED = 64, 9  # blocks
LETTERS = Grammar("regex", "[a-e]{40,60}")
LATE = Grammar("regex", "[abc]{20}" + r"[\w-]{1,200}" * 60)  # its second part is more than a step may take


def params(grammar: Grammar | None, seed: int, temperature: float = 0.0) -> SamplingParams:
    return SamplingParams(max_tokens=70, seed=seed, temperature=temperature, grammar=grammar)


def tiny_engine(files: ModelFiles, num_blocks: int) -> Engine:
    model = load_model(files, EngineConfig(device="cpu", kv_memory="4MiB", block_size=16))
    return small_engine(files, model.runner, num_blocks, 48, 6)


@pytest.mark.slow
def test_a_preempted_answer_with_a_grammar_is_the_same(files: ModelFiles, grammars: GrammarCompiler) -> None:
    wanted = [params(LETTERS, seed, temperature=seed % 2 * 0.8) for seed in range(4)]
    roomy, pressed = tiny_engine(files, ROOMY), tiny_engine(files, PRESSED)
    answers = run(roomy, sequences(wanted, 1, grammars))
    assert run(pressed, sequences(wanted, 1, grammars)) == answers
    assert roomy.scheduler.num_preemptions == 0
    assert pressed.scheduler.num_preemptions > 0
    assert all(len(tokens) > 20 for tokens in answers.values())


def test_a_grammar_that_takes_too_much_later_ends_its_own_answer_alone(
    files: ModelFiles, grammars: GrammarCompiler
) -> None:
    engine = tiny_engine(files, ROOMY)
    wanted = [params(LATE, 1), params(LETTERS, 2), params(None, 3)]
    alone = run(tiny_engine(files, ROOMY), sequences(wanted, 1, grammars)[1:])
    for sequence in sequences(wanted, 1, grammars):
        engine.add(sequence)
    ends: dict[str, str | None] = {}
    answers: dict[str, list[int]] = {"r0": [], "r1": [], "r2": []}
    while engine.has_work:
        for output in engine.step().outputs:
            answers[output.sequence.request_id] += output.token_ids
            if output.finish:
                ends[output.sequence.request_id] = output.error
                assert output.invalid == (output.sequence.request_id == "r0")
    assert "the grammar cannot be followed" in (ends["r0"] or "")
    assert 0 < len(answers["r0"]) < 40
    assert (ends["r1"], ends["r2"]) == (None, None)
    assert {name: answers[name] for name in ("r1", "r2")} == alone
