import asyncio
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from baton_proto.grammar import MAX_ALTERNATIVES, Grammar
from router.text.tokenizer import Tokenizer
from runtime.errors import InvalidRequestError, UnavailableError
from runtime.grammar.bounds import written_out
from runtime.grammar.compiler import THREADS, GrammarCompiler
from tests.tiny_model import EOS_TOKEN_IDS, VOCAB_SIZE


def allowed(words: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


TAG = '{"structures": [{"begin": "<f>", "schema": {"const": 1}, "end": "</f>"}], "triggers": ["<f"]}'
GOOD = {
    Grammar("json_object"): '{"a": [1, null]}',
    Grammar("json_schema", '{"type": "array", "items": {"type": "integer"}}'): "[1, 22]",
    Grammar("regex", "[a-c]{2,3}x"): "abcx",
    Grammar("choice", choices=("yes", "no", 'ü"')): 'ü"',
    Grammar("ebnf", 'root ::= "a" | "b" root'): "bba",
    Grammar("structural_tag", TAG): "so <f>1</f>",
}

CONST: dict[str, object] = {"type": "json_schema", "json_schema": {"const": 1}}
CALL: dict[str, object] = {"begin": "<f=g>", "content": CONST, "end": "</f>"}
FORMATS: list[tuple[dict[str, object], str]] = [
    ({"type": "triggered_tags", "triggers": ["<f"], "tags": [CALL]}, "so <f=g>1</f> and <f=g>1</f>."),
    ({"type": "triggered_tags", "triggers": ["<f"], "tags": [CALL]}, "no call"),
    ({"type": "triggered_tags", "triggers": ["<f"], "tags": [CALL], "stop_after_first": True}, "so <f=g>1</f>"),
    ({"type": "triggered_tags", "triggers": ["<f"], "tags": [CALL], "at_least_one": True}, "<f=g>1</f>"),
    (CALL | {"type": "tag"}, "<f=g>1</f>"),
    ({"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}, "<t>anything </t>"),
    (
        {"type": "sequence", "elements": [{"type": "const_string", "value": "a/"}, CONST, CALL | {"type": "tag"}]},
        "a/1<f=g>1</f>",
    ),
    ({"type": "or", "elements": [CONST, {"type": "regex", "pattern": "a+/"}]}, "aaa/"),
    ({"type": "regex", "pattern": "a\\/[/b]"}, "a/b"),
]


@pytest.mark.parametrize(("given", "text"), FORMATS)
def test_the_newer_form_of_structural_tags_allows_its_answer_and_then_the_end(
    compiler: GrammarCompiler, tiny_model: Path, given: dict[str, object], text: str
) -> None:
    grammar = Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": given}))
    test_every_kind_allows_its_answer_and_then_the_end(compiler, tiny_model, grammar, text)


def test_what_a_trigger_opens_is_a_call(compiler: GrammarCompiler, tiny_model: Path) -> None:
    given = {"type": "triggered_tags", "triggers": ["<f"], "tags": [CALL]}
    matcher = compiler.matcher(Grammar("structural_tag", json.dumps({"format": given})))
    tokens = Tokenizer(tiny_model, VOCAB_SIZE).encode("so <f=g>2").tolist()
    assert tokens[-1] not in allowed(matcher.mask(tokens[:-1]))


@pytest.mark.parametrize(("grammar", "text"), GOOD.items(), ids=[grammar.kind for grammar in GOOD])
def test_every_kind_allows_its_answer_and_then_the_end(
    compiler: GrammarCompiler, tiny_model: Path, grammar: Grammar, text: str
) -> None:
    tokens = Tokenizer(tiny_model, VOCAB_SIZE).encode(text).tolist()
    matcher = compiler.matcher(grammar)
    for count, token in enumerate(tokens):
        assert token in allowed(matcher.mask(tokens[:count])), text[count:]
    assert allowed(matcher.mask(tokens)) >= {*EOS_TOKEN_IDS}
    assert allowed(compiler.matcher(grammar).mask(tokens)) == allowed(matcher.mask(tokens)), "a fresh one reads it all"
    assert not matcher.problem


def test_the_end_is_put_off_only_while_something_else_may_follow(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(Grammar("regex", "a+"))
    a = min(allowed(matcher.mask([])))
    assert allowed(matcher.mask([a], ends=False)).isdisjoint(EOS_TOKEN_IDS)
    once = compiler.matcher(Grammar("regex", "a"))
    assert allowed(once.mask([a], ends=False)) == {*EOS_TOKEN_IDS}


def test_output_that_does_not_match_is_a_problem_and_ends(compiler: GrammarCompiler) -> None:
    matcher = compiler.matcher(Grammar("choice", choices=("yes",)))
    assert allowed(matcher.mask([5])) == {*EOS_TOKEN_IDS}
    assert "cannot be followed" in matcher.problem


def wide(count: int) -> dict[str, object]:
    """Any of the properties may be left out, so each may follow each."""
    return {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(count)}}


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


BAD = {
    Grammar("json_schema", '{"properties": {"a": {"items": {"not": {}}}}}'): "'not' at $.properties.a.items.not",
    **{
        Grammar("json_schema", json.dumps({"properties": {"a": {"items": wrong}}})): f"$.properties.a.items{problem}"
        for wrong, problem in (
            (
                {"oneOf": [{"type": "object"}, {"type": "object"}]},
                ".oneOf: oneOf constraints are not supported. use anyOf",
            ),
            ({"type": "string", "pattern": "(?=a)b"}, ".pattern: regex parse error"),
            ({"$ref": "#/$defs/none"}, ".$ref: Pointer '/$defs/none' does not exist"),
            ({"type": "strin"}, ".type: Invalid type: strin"),
            ({"minItems": -1}, ".minItems: Expected positive integer"),
            ({"prefixItems": [{}, {"multipleOf": 0}]}, ".prefixItems[1].multipleOf: invalid multiple of"),
            ({"allOf": [{}, {"uniqueItems": True}]}, ".allOf[1].uniqueItems, which is not supported"),
        )
    },
    Grammar(
        "json_schema",
        json.dumps(
            {
                "type": "object",
                "properties": {"a": {"type": "object", "properties": {"b": False}, "required": ["b"]}},
                "required": ["a"],
            }
        ),
    ): "$.properties.a.required: Unsatisfiable schema: required property 'b' is unsatisfiable",
    Grammar(
        "json_schema",
        json.dumps(
            {
                "properties": {"a": {"$ref": "#/$defs/tree"}},
                "$defs": {"tree": {"items": {"$ref": "#/$defs/tree"}, "uniqueItems": True}},
            }
        ),
    ): "'uniqueItems' at $.$defs.tree.uniqueItems",
    Grammar("json_schema", '{"$ref": "#"}'): "no answer",
    Grammar("json_schema", '{"x'): "cannot be used",
    Grammar("json_schema", "[]"): "an object or a boolean",
    Grammar("json_schema", nested(5000)): "nested",
    Grammar("json_schema", json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(9000)}})): "too big",
    Grammar("regex", "(a"): "unclosed group",
    Grammar("regex", "(a{1000}){1000}"): "1000000 when written out",
    Grammar("json_schema", '{"type": "string", "pattern": "(a{999}){999}"}'): "written out",
    Grammar("choice"): "one or more texts",
    Grammar("ebnf", "start: nosuch"): "unknown name",
    Grammar("ebnf", "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(3000))): "at most 16384",
    Grammar("structural_tag", "{}"): "structures",
    Grammar("structural_tag", '{"format": ' + '{"type": "sequence", "elements": [' * 400 + "]}" * 400 + "}"): "nested",
    Grammar("structural_tag", '{"format": {"type": "odd"}}'): "format.type is 'odd', must be one of triggered_tags",
    Grammar(
        "structural_tag",
        '{"format": {"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": "<", "end": ""}]}}',
    ): "format.tags[0].content is missing",
    Grammar(
        "structural_tag", '{"format": {"type": "sequence", "elements": [{"type": "const_string"}]}}'
    ): "format.elements[0].value is missing",
    Grammar("structural_tag", '{"format": {"type": "triggered_tags", "tags": []}}'): "format.triggers is missing",
    Grammar("regex", "x" * 300_000): "at most 262144",
    Grammar("regex", "|".join(f"word{number}" for number in range(3000))): "at most 16384 are allowed in one",
    Grammar("choice", choices=("yes", "x" * 20_000)): "text of 20000 characters",
    Grammar("json_schema", json.dumps({"const": "x" * 20_000})): "a text of 20000",
    Grammar("json_schema", json.dumps({"enum": ["x" * 1000] * 1000})): "has 1004010 characters",
    Grammar("json_schema", json.dumps(wide(5000))): "number of symbols",
    Grammar("json_schema", json.dumps({"patternProperties": {f".*{i}.*": {} for i in range(100)}})): "patternProperty",
}


@pytest.mark.parametrize(("grammar", "problem"), BAD.items(), ids=[problem[:30] for problem in BAD.values()])
def test_what_cannot_be_followed_is_refused_and_says_why(
    compiler: GrammarCompiler, grammar: Grammar, problem: str
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        compiler.matcher(grammar, "guided")
    assert refusal.value.field == "guided"
    assert problem in refusal.value.problem


ALLOWED = {
    "refs": {
        "$defs": {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(40)}
        | {"d40": {"type": "string"}},
        "$ref": "#/$defs/d0",
    },
    "recursion": {"type": "object", "properties": {"next": {"$ref": "#"}}},
    "enum": {"enum": [f"value {number}" for number in range(5000)]},
    "properties": wide(500),
}


def test_the_schemas_of_many_tools_are_no_text_in_one_piece(compiler: GrammarCompiler) -> None:
    schema = json.dumps({"type": "object", "properties": {"path": {"type": "string", "description": "Long. " * 100}}})
    rules = "\n".join(f"rule_{i}: %json {schema}" for i in range(40))
    lark = f"start: {' | '.join(f'rule_{i}' for i in range(40))}\n{rules}"
    assert len(lark) > 16 * 1024
    assert allowed(compiler.matcher(Grammar("ebnf", lark)).mask([]))


@pytest.mark.parametrize("schema", ALLOWED.values(), ids=ALLOWED)
def test_large_grammars_within_the_bounds_can_be_followed(compiler: GrammarCompiler, schema: dict[str, object]) -> None:
    assert allowed(compiler.matcher(Grammar("json_schema", json.dumps(schema))).mask([]))


def test_a_choice_of_many_texts_can_be_followed_to_its_end(compiler: GrammarCompiler, tiny_model: Path) -> None:
    grammar = Grammar("choice", choices=tuple(f"answer {number}." for number in range(MAX_ALTERNATIVES)))
    tokens = Tokenizer(tiny_model, VOCAB_SIZE).encode("answer 4095.").tolist()
    matcher = compiler.matcher(grammar)
    assert [matcher.mask(tokens[:count]).any() for count in range(len(tokens))]
    assert allowed(matcher.mask(tokens)) == {*EOS_TOKEN_IDS}
    assert not matcher.problem


async def test_what_is_not_compiled_in_time_is_refused_and_says_so(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, go = GrammarCompiler(tiny_model, VOCAB_SIZE, EOS_TOKEN_IDS), threading.Event()
    kept = Grammar("regex", "a")
    compiler.matcher(kept)
    monkeypatch.setattr("runtime.grammar.compiler.TIMEOUT_S", 0.05)
    held = [asyncio.create_task(compiler._lane.run(None, go.wait, 30)) for _ in range(THREADS)]
    await asyncio.sleep(0)  # they hold all threads but one, which is another tenant's
    try:
        with pytest.raises(UnavailableError, match="kept all threads for grammars busy"):
            await compiler.matcher_soon(Grammar("regex", "b"), "guided")
        with pytest.raises(UnavailableError, match="kept all threads for grammars busy"):
            await compiler.matcher_soon(Grammar("regex", "b"), "guided", time.monotonic() + 0.01)
        assert (await compiler.matcher_soon(kept)).mask([]).any(), "what is kept waits for no thread"
    finally:
        go.set()
        await asyncio.gather(*held)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("abc", 1),
        ("a{3}", 3),
        ("(a{3}b{4}){5}", 20),
        (r"\{9}(x{2}){,6}y{7}", 12),
        ("((a{2})){2}", 4),
        (f"a{{ {'0' * 30}7 , }}", 7),
        ("a{" + "9" * 30 + "}", 10**9),
        ("a{99}" * 9 + "{999999999}" * 9, 10**9),
    ],
)
def test_nested_repeats_are_multiplied(text: str, size: int) -> None:
    assert written_out(text) == size
