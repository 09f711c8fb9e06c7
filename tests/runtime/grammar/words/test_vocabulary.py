"""Whatever a tokenizer adds, grammars take its marks in either spelling and let no control token into a text."""

import json

import pytest

from baton_proto.grammar import Grammar
from tests.scripted_families import FAMILIES
from tests.spelling import Spelling


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
