"""Whatever a tokenizer adds, grammars take its marks in either spelling and let no control token into a text."""

import json
from pathlib import Path

import numpy as np
import pytest

from baton_proto.grammar import Grammar
from runtime.grammar.compiler import GrammarCompiler
from tests.scripted_families import FAMILIES
from tests.spelling import Spelling
from tests.tiny_model import EOS_TOKEN_IDS, VOCAB_SIZE, write_tiny_model


@pytest.fixture(scope="module", params=FAMILIES)
def spelling(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Spelling:
    return Spelling(tmp_path_factory.mktemp("model"), FAMILIES[request.param])


def test_a_text_has_every_added_token_that_is_not_special_and_no_other(spelling: Spelling) -> None:
    texts = Grammar("regex", "a(.|\\n)*"), Grammar("json_schema", '{"type": "string"}')
    for mark, token in spelling.tokenizer.matched_tokens.items():
        ordinary = token not in spelling.tokenizer.hidden_token_ids
        assert spelling.lets_through(texts[0], [*spelling.tokens("a "), token, *spelling.tokens("b")]) is ordinary, mark
        assert spelling.lets_through(texts[0], spelling.plain(f"a {mark}!")), mark
        assert spelling.lets_through(texts[1], [*spelling.tokens('"'), token, *spelling.tokens('"')]) is ordinary, mark


def test_a_structural_tag_begins_and_ends_with_marks_in_either_spelling(spelling: Spelling) -> None:
    marks = [mark for mark, token in spelling.tokenizer.matched_tokens.items() if token != spelling.end]
    for begin, end in zip(marks, reversed(marks), strict=True):
        tag = {"begin": f"{begin}f=", "schema": {"type": "integer"}, "end": end}
        grammar = Grammar("structural_tag", json.dumps({"structures": [tag], "triggers": [begin]}))
        text = f"So: {begin}f=12{end}"
        assert spelling.lets_through(grammar, spelling.tokens(text)), (begin, end)
        assert spelling.lets_through(grammar, spelling.plain(text)), (begin, end)
        assert not spelling.lets_through(grammar, spelling.tokens(text.replace("12", "x"))), (begin, end)


def test_what_a_grammar_leaves_no_choice_of_has_either_spelling_too(spelling: Spelling) -> None:
    for mark, token in spelling.tokenizer.matched_tokens.items():
        grammar = Grammar("choice", choices=(f"{mark} it is",))
        assert spelling.lets_through(grammar, spelling.plain(f"{mark} it is")), mark
        ordinary = token not in spelling.tokenizer.hidden_token_ids
        assert spelling.lets_through(grammar, spelling.tokens(f"{mark} it is")) is ordinary, mark


def test_a_grammar_in_lark_names_any_added_token(spelling: Spelling) -> None:
    for mark, token in spelling.tokenizer.matched_tokens.items():
        if mark.startswith("<") and token != spelling.end:
            lark = f'start: {mark} "<" WORD // not "{mark}\nWORD: /[a-z<>]+\\/"?/'
            assert spelling.lets_through(Grammar("ebnf", lark), [token, *spelling.tokens('<ab/"')]), mark


def test_ids_without_a_token_are_in_no_text_and_take_no_time_to_read(tmp_path: Path) -> None:
    """A model of 151,936 ids with a tokenizer of 512 tokens took two minutes to start."""
    path = write_tiny_model(tmp_path) / "tokenizer.json"
    file = json.loads(path.read_text())
    words = file["model"]["vocab"]
    last = max(words, key=words.__getitem__)
    words[last] += 7
    path.write_text(json.dumps(file))
    matcher = GrammarCompiler(tmp_path, 151_936, EOS_TOKEN_IDS).matcher(Grammar("regex", "(.|\\n)*"))
    bits = np.unpackbits(np.asarray(matcher.mask([])).view(np.uint8), bitorder="little")
    assert bits[words[last]]
    assert not bits[VOCAB_SIZE - 1 : words[last]].any()
    assert not bits[words[last] + 1 :].any()
