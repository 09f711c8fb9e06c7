"""The masks of a step, beside those of fresh matchers one by one."""

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from baton_proto.grammar import Grammar
from runtime.grammar.compiler import GrammarCompiler
from runtime.grammar.matcher import Asked, Words, fill_masks
from tests.tiny_model import EOS_TOKEN_IDS, VOCAB_SIZE

GRAMMARS = [
    Grammar("regex", "[a-e]{2,9}"),
    Grammar("regex", "a+"),
    Grammar("choice", choices=("yes", "no")),
    Grammar("json_schema", '{"type": "array", "items": {"type": "integer"}}'),
]


def allowed(words: Words) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one by one"])
def test_the_masks_of_many_steps_are_those_of_fresh_matchers(compiler: GrammarCompiler, at_once: bool) -> None:
    """Answers that end at different steps, that put their end off, that go on after it, and that stop to match."""
    source = random.Random(1)
    matchers = [compiler.matcher(GRAMMARS[row % 4]) for row in range(24)]
    outputs = [list[int]() for _ in matchers]
    words = np.full((len(matchers), -(-VOCAB_SIZE // 32)), -1, dtype=np.int32)
    failed = ended = 0
    for step in range(20):
        ends = [row % 3 > 0 or step > 12 for row in range(len(matchers))]
        asked = [
            Asked(matcher, output[matcher.num_read :], may_end)
            for matcher, output, may_end in zip(matchers, outputs, ends, strict=True)
        ]
        matchers[0].room.is_slow = not at_once
        fill_masks(asked, words)
        for row, output in enumerate(outputs):
            fresh = compiler.matcher(GRAMMARS[row % 4])
            assert allowed(words[row]) == allowed(fresh.mask(output, ends=ends[row])), (row, output)
            assert bool(matchers[row].problem) == bool(fresh.problem)
            failed += bool(fresh.problem)
            token = source.choice(allowed(words[row]))
            if len(output) > 2 and output[-3] in EOS_TOKEN_IDS:
                matchers[row], outputs[row] = compiler.matcher(GRAMMARS[row % 4]), []
                ended += 1
            elif row == 5 and step == 3:
                output.append(9)
            elif token in EOS_TOKEN_IDS or row % 2:
                output.append(token)
            else:  # two tokens at once
                output += [token, source.choice(allowed(compiler.matcher(GRAMMARS[row % 4]).mask([*output, token])))]
    assert failed
    assert ended > 20


def test_a_problem_says_that_the_vocabulary_has_no_token_that_may_follow(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    matcher = GrammarCompiler(tmp_path, 4, [3]).matcher(Grammar("regex", "a{8}c"))
    assert allowed(matcher.mask([0] * 7)) == [0]
    assert allowed(matcher.mask([0] * 8)) == [3]
    assert matcher.problem == "the grammar cannot be followed: no token may follow"


def test_a_grammar_whose_masks_take_ever_longer_ends_its_own_answer_alone(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.grammar.matcher.USUAL_S", 0.001)
    monkeypatch.setattr("runtime.grammar.matcher.SLOW_BATCH_S", 0.001)
    monkeypatch.setattr("runtime.grammar.matcher.MAX_SLOW_S", 0.5)
    matchers = [compiler.matcher(Grammar("ebnf", 'start: start start | "a" | ""')), compiler.matcher(GRAMMARS[0])]
    words: Words = np.empty((2, matchers[0].ends.num_words), dtype=np.int32)
    tokens = iter([allowed(matchers[0].mask([], ends=False))[0]] * 400)
    fill_masks([Asked(matcher, [], False) for matcher in matchers], words)
    while not matchers[0].problem:
        fill_masks([Asked(matchers[0], [next(tokens)], False), Asked(matchers[1], [], False)], words)
    assert "take too long" in matchers[0].problem
    assert matchers[0].is_invalid
    assert not matchers[1].problem
