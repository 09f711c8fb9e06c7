"""Whatever a model writes under the grammar of its family, the family's parser reads as calls."""

import json
import random
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from baton_proto.grammar import Grammar
from router.parsing.call_grammars import Rest, Thought, answer_grammar
from router.parsing.events import Arguments, CallBegun, Reasoning, joined
from router.parsing.families import TOOL_FAMILIES
from router.parsing.parsing import ModelFamilies, Parsing, model_families
from router.text.output_text import OutputText
from router.text.tokenizer import Tokenizer
from runtime.errors import InvalidRequestError
from runtime.grammar.compiler import GrammarCompiler
from runtime.grammar.words.marks import Marks
from tests.scripted_families import FAMILIES
from tests.spelling import Spelling
from tests.tiny_model import EOS_TOKEN_IDS, VOCAB_SIZE

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "n": {"type": "integer"},
        "kind": {"enum": ["a", "b"], "type": "string"},
    },
    "required": ["text", "n", "kind"],
    "additionalProperties": False,
}
END = "\n</parameter>"  # of a text in XML, which random tokens hardly ever meet
TOOLS = [("find", SCHEMA), ("stop", {"type": "object", "properties": {}, "additionalProperties": False})]


@pytest.fixture(scope="module")
def grammars(tiny_model: Path) -> GrammarCompiler:
    return GrammarCompiler(tiny_model, VOCAB_SIZE, EOS_TOKEN_IDS)


def written(grammars: GrammarCompiler, tokenizer: Tokenizer, grammar: str, seed: int) -> list[int]:
    """Random tokens that the grammar lets through, with a liking for those that close something."""
    matcher, output, dice = grammars.matcher(Grammar("ebnf", grammar)), list[int](), random.Random(seed)
    while len(output) < 2000:
        mask = np.unpackbits(matcher.mask(output).view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(mask[:VOCAB_SIZE]).tolist()
        if ends := set(allowed) & set(EOS_TOKEN_IDS):
            return [*output, min(ends)]
        text = tokenizer.decode(output[-16:])
        rest = next(END[k:] for k in range(len(END) - 1, -1, -1) if text.endswith(END[:k]))
        closing = [one for one in allowed if (shown := tokenizer.token_text(one)) and rest.startswith(shown)]
        closing = closing if "<parameter=" in grammar else []
        closing = closing or [one for one in allowed if tokenizer.token_text(one)[:1] in ('"', "}", "<", "]")]
        output.append(dice.choice(closing if closing and dice.random() < 0.8 else allowed))
    raise AssertionError(tokenizer.decode(output)[:500])


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek_v3", "harmony"])
@pytest.mark.parametrize("marks", [{}, {"<tool_call>": 1, "[TOOL_CALLS]": 1, "<｜tool▁calls▁begin｜>": 1}])
def test_what_the_grammar_lets_through_are_calls(
    family: str, marks: dict[str, int], grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    families = ModelFamilies(family, None, Marks(marks, frozenset(marks.values())))
    assert families.tools is not None
    grammar = answer_grammar(families, TOOLS, many=True, thought="may begin", rest="calls")
    assert grammar is not None
    for seed in range(4):
        token_ids = written(grammars, tokenizer, grammar, seed)
        spelled = {token_id: mark.encode() for mark, token_id in marks.items() if mark in families.tools.opens}
        shown = [spelled.get(one, b"") if one in (0, 1, 2) else tokenizer.token_bytes(one) for one in token_ids]
        text = b"".join(shown).decode()
        check_calls(text, families)


def check_calls(text: str, families: ModelFamilies) -> None:
    parser = Parsing(families.tools, families.reasoning, frozenset(), dict(TOOLS)).parser(str)
    events = joined(parser.push(text) + parser.end(cut=False))
    assert all(isinstance(event, CallBegun | Arguments) for event in events), text
    begun = [event for event in events if isinstance(event, CallBegun)]
    assert begun
    for call in begun:
        given = json.loads("".join(e.text for e in events if isinstance(e, Arguments) and e.index == call.index))
        assert set(given) == set(dict(TOOLS)[call.name]["properties"]), text
        if call.name == "find":
            assert isinstance(given["text"], str)
            assert isinstance(given["n"], int)
            assert given["kind"] in ("a", "b")


def lets_through(grammars: GrammarCompiler, tokenizer: Tokenizer, grammar: str | Grammar, text: str) -> bool:
    """The whole text, and its end there."""
    grammar = Grammar("ebnf", grammar) if isinstance(grammar, str) else grammar
    matcher, output = grammars.matcher(grammar), list[int]()
    for token_id in [*map(int, tokenizer.encode(text, add_special_tokens=False)), EOS_TOKEN_IDS[0]]:
        mask = np.unpackbits(matcher.mask(output).view(np.uint8), bitorder="little")
        if not mask[token_id]:
            return False
        output.append(token_id)
    return True


GOOD = '{"name": "find", "arguments": {"text": "a", "n": 1, "kind": "a"}}'
FREE = [
    ("", True),
    ("Only text, < and <tool, even </tool_call>.", True),
    (f"Let me see.\n<tool_call>\n{GOOD}\n</tool_call>", True),
    (f"<tool_call>\n{GOOD}\n</tool_call>\n<tool_call>\n{GOOD}\n</tool_call>\nDone.", True),
    ("<tool_call>", False),
    (f"Hm. <tool_call>\n{GOOD[:20]}", False),
    (f"<tool_call>\n{GOOD.replace('find', 'fund')}\n</tool_call>", False),
    (f"<tool_call>\n{GOOD.replace('1', 'true')}\n</tool_call>", False),
]


@pytest.mark.parametrize(("text", "good"), FREE)
def test_where_text_is_free_too_what_follows_a_mark_is_a_call(
    text: str, good: bool, grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = answer_grammar(ModelFamilies("hermes"), TOOLS, many=True, thought="may begin", rest="text with calls")
    assert grammar is not None
    assert lets_through(grammars, tokenizer, grammar, text) is good
    single = answer_grammar(ModelFamilies("hermes"), TOOLS, many=False, thought="may begin", rest="text with calls")
    assert single is not None
    assert lets_through(grammars, tokenizer, single, text) is (good and text.count("<tool_call>") < 2)


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "mistral", "deepseek_v3"])
@pytest.mark.parametrize("marks", [{}, {"<tool_call>": 1, "[TOOL_CALLS]": 1, "<｜tool▁calls▁begin｜>": 1}])
def test_whatever_is_written_where_text_is_free_has_no_half_call(
    family: str, marks: dict[str, int], grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    families = ModelFamilies(family, None, Marks(marks, frozenset(marks.values())))
    required = answer_grammar(families, TOOLS, many=False, thought="may begin", rest="calls")
    free = answer_grammar(families, TOOLS, many=True, thought="may begin", rest="text with calls")
    assert required is not None
    assert free is not None
    token_ids = written(grammars, tokenizer, required, 1)[:-1]
    before = [*map(int, tokenizer.encode("Let me see. ", add_special_tokens=False))]
    matcher, output = grammars.matcher(Grammar("ebnf", free)), list[int]()
    ends = []
    for token_id in [*before, *token_ids, *before, EOS_TOKEN_IDS[0]]:
        mask = np.unpackbits(matcher.mask(output).view(np.uint8), bitorder="little")
        assert mask[token_id], tokenizer.decode(output)
        ends.append(bool(mask[EOS_TOKEN_IDS[0]]))
        output.append(token_id)
    assert all(ends[: len(before) + 1])
    assert families.tools is not None
    (mark,) = families.tools.opens
    spelled = {token_id: text for text, token_id in marks.items() if text == mark}
    texts = [spelled.get(one, tokenizer.token_text(one)) for one in token_ids]
    opened = next(
        k for k in range(len(texts)) if mark in "".join(texts[: k + 1]) or mark in tokenizer.decode(token_ids[: k + 1])
    )
    within = ends[len(before) + opened + 1 : len(before) + len(token_ids)]
    assert within
    assert not any(within), "an answer may end within its call"
    assert ends[-1]


def test_reasoning_that_the_prompt_has_opened_comes_before_the_calls(
    grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    families = ModelFamilies("hermes", "think")
    grammar = answer_grammar(families, TOOLS[1:], many=False, thought="has begun", rest="calls")
    assert grammar is not None
    text = 'I think.</think>\n\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    mask = grammars.matcher(Grammar("ebnf", grammar)).mask([*map(int, tokenizer.encode(text))])
    ends = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert set(ends.tolist()) == set(EOS_TOKEN_IDS)
    parser = Parsing(families.tools, families.reasoning, frozenset(), in_reasoning=True).parser(str)
    events = joined(parser.push(text) + parser.end(cut=False))
    assert events[0] == Reasoning("I think.")
    assert isinstance(events[1], CallBegun)


def test_a_call_in_harmony_may_stand_behind_reasoning(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = answer_grammar(ModelFamilies("harmony", "harmony"), TOOLS, many=True, thought="may begin", rest="calls")
    assert grammar is not None
    call = "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}"
    thought = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
    assert lets_through(grammars, tokenizer, grammar, call)
    assert lets_through(grammars, tokenizer, grammar, thought + call)
    assert not lets_through(grammars, tokenizer, grammar, thought + call.replace("{}", '{"a": 1}'))
    assert not lets_through(grammars, tokenizer, grammar, thought)


FOUND = '{"text": "a </tool_response> b", "n": 1, "kind": "a"}'
WRITTEN: dict[str, tuple[str, str | None, str, str]] = {  # family, its reasoning, a thought, a call
    "qwen3": (
        *("hermes", "think", "<think>\nHm, <tool_response>.\n</think>\n\n"),
        f'<tool_call>\n{{"name": "find", "arguments": {FOUND}}}\n</tool_call>',
    ),
    "llama3": ("llama3_json", None, "", f'<|python_tag|>{{"name": "find", "parameters": {FOUND}}}'),
    "mistral": ("mistral", None, "", f"[TOOL_CALLS]find[ARGS]{FOUND}"),
    "deepseek": (
        *("deepseek_v3", "think", "<think>\nHm, <｜User｜>.\n</think>\n\n"),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n"
        f"```json\n{FOUND}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "harmony": (
        *("harmony", "harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"),
        f"<|channel|>commentary to=functions.find <|constrain|>json<|message|>{FOUND}",
    ),
}
FINAL = "<|channel|>final<|message|>"


@pytest.fixture(scope="module", params=WRITTEN)
def spelling(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Spelling]:
    return request.param, Spelling(tmp_path_factory.mktemp("model"), FAMILIES[request.param])


def families_of(name: str, spelling: Spelling) -> ModelFamilies:
    tools, reasoning, _, _ = WRITTEN[name]
    tokenizer = spelling.tokenizer
    return model_families(tools, reasoning or "none", "", True, tokenizer.matched_tokens, tokenizer.hidden_token_ids)


@pytest.mark.parametrize("rest", get_args(Rest))
@pytest.mark.parametrize("thought", get_args(Thought))
def test_thoughts_calls_and_formats_pass_in_either_spelling_of_their_marks(
    spelling: tuple[str, Spelling], rest: Rest, thought: Thought
) -> None:
    name, told = spelling
    families = families_of(name, told)
    around = answer_grammar(families, TOOLS, many=False, thought=thought, rest=rest)
    if around is None:
        assert rest == "text with calls"
        assert families.tools is not None
        assert families.tools.bare
        return
    grammar = Grammar("ebnf", around)
    if "format" in rest:
        grammar = Grammar("json_schema", json.dumps({"type": "array", "items": {"type": "integer"}}), around=around)
    _, _, thinks, call = WRITTEN[name]
    begun = thinks if families.reasoning is None else thinks.removeprefix(families.reasoning.opens)
    head = {"may begin": thinks, "has begun": begun, "has ended": ""}[thought]
    good = [head + call] if rest != "format" else []
    good += [head + "[1, 2]"] if "format" in rest else []
    good += [f"{head}{FINAL}[1, 2]"] if "format" in rest and name == "harmony" else []
    good += [f"{head}Only text.", f"{head}Text. {call}"] if rest == "text with calls" else []
    good += [text.removeprefix(thinks) for text in good] if thought == "may begin" else []
    for text in good:
        assert told.lets_through(grammar, told.tokens(text)), text
        assert told.lets_through(grammar, told.plain(text)), text
    bad = [head + call.replace('"n": 1', '"n": "x"')]
    bad += [head + '["a"]', f"{head}Only text."] if rest != "text with calls" else []
    for text in bad:
        assert not told.lets_through(grammar, told.tokens(text)), text
        assert not told.lets_through(grammar, told.plain(text)), text


def test_pythonic_calls_stand_beside_a_format_and_keep_no_schema(
    grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    pythonic = ModelFamilies("pythonic")
    assert answer_grammar(pythonic, TOOLS, many=True, thought="has ended", rest="calls") is None
    around = answer_grammar(pythonic, TOOLS, many=True, thought="has ended", rest="calls or format")
    assert around is not None
    matcher = grammars.matcher(Grammar("json_object", around=around))
    text = "[find(text='it\\'s', n=-1.5, kind=[True, None, {\"a\": []}]), stop()]"
    output = list(map(int, tokenizer.encode(text)))
    assert set(np.flatnonzero(np.unpackbits(matcher.mask(output).view(np.uint8), bitorder="little"))) == set(
        EOS_TOKEN_IDS
    )
    parser = Parsing(pythonic.tools, None, frozenset(), formatted=True).parser(str)
    events = joined(parser.push(text) + parser.end(cut=False))
    assert [event.name for event in events if isinstance(event, CallBegun)] == ["find", "stop"]


def test_special_tokens_that_are_marks_are_spelled_among_the_text(tokenizer: Tokenizer) -> None:
    plain, marked = OutputText(tokenizer, ()), OutputText(tokenizer, (), marks=frozenset((1,)))
    token_ids = [*map(int, tokenizer.encode("ça")), 1, 2, *map(int, tokenizer.encode(" va"))]
    assert plain.push(token_ids)[1] == "ça va"
    assert marked.push(token_ids)[1] == "ça<|im_start|> va"


TEXTS: list[tuple[dict[str, object], str, bool]] = [
    ({}, "any\ntext", True),
    ({}, "a</parameter>b", False),
    ({"const": "a/b"}, "a/b", True),
    ({"const": "a/b"}, "a", False),
    ({"enum": ["a", None]}, "a", True),
    ({"enum": ["a", None]}, "null", False),
    ({"maxLength": 3}, "äbc", True),
    ({"maxLength": 3}, "abcd", False),
    ({"minLength": 2, "maxLength": 30}, "a", False),
    ({"pattern": "^[a-c]+$"}, "abc", True),
    ({"pattern": "^[a-c]+$"}, "abcd", False),
    ({"pattern": "b/|^c"}, "ab/a", True),
    ({"pattern": "b/|^c"}, "cd", True),
    ({"pattern": "b/|^c"}, "dc", False),
    ({"pattern": "^a", "maxLength": 2}, "abb", False),
    ({"format": "date"}, "2026-02-28", True),
    ({"format": "date"}, "2026-13-28", False),
    ({"format": "date-time"}, "2026-02-28T10:11:12.5+01:00", True),
    ({"format": "email"}, "a.b@c.de", True),
    ({"format": "email"}, "a.b", False),
    ({"format": "ipv4"}, "10.0.0.256", False),
    ({"format": "uri"}, "https://a.b/c?d=e/f", True),
    ({"format": "uuid"}, "123e4567-e89b-12d3-a456-426614174000", True),
    ({"format": "hostname", "title": "A host", "x-ours": 1}, "a-b.c", True),
    ({"format": "time"}, "10:11", False),
]


@pytest.mark.parametrize(("says", "text", "good"), TEXTS)
def test_a_text_in_xml_matches_its_schema(
    says: dict[str, object], text: str, good: bool, grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", **says}}, "required": ["a"]}
    grammar = answer_grammar(
        ModelFamilies("qwen3_coder"), [("f", schema)], many=False, thought="may begin", rest="calls"
    )
    assert grammar is not None
    call = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    assert lets_through(grammars, tokenizer, grammar, call) is good
    if good:
        parser = Parsing(TOOL_FAMILIES["qwen3_coder"], None, frozenset(), {"f": schema}).parser(str)
        (_, arguments) = joined(parser.push(call) + parser.end(cut=False))
        assert isinstance(arguments, Arguments)
        assert json.loads(arguments.text) == {"a": text}


@pytest.mark.parametrize(
    "says", [{"format": "ipv6"}, {"pattern": "(^a)"}, {"enum": [1]}, {"not": {"const": "a"}}, {"maxLength": 20_001}]
)
def test_what_a_text_without_quotes_cannot_follow_is_refused_with_its_path(says: dict[str, object]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", **says}}}
    with pytest.raises(InvalidRequestError) as refusal:
        answer_grammar(ModelFamilies("qwen3_coder"), [("f", schema)], many=False, thought="may begin", rest="calls")
    (keyword,) = says
    assert f"f.properties.a.{keyword}" in refusal.value.problem


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "pythonic"])
@pytest.mark.parametrize("text", ['{"found": true}', '{"name": "find"}', '["find", {}]', '{"name": {"parameters": 1}}'])
def test_a_format_that_begins_as_a_call_is_let_through(
    name: str, text: str, grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    around = answer_grammar(ModelFamilies(name), TOOLS, many=True, thought="may begin", rest="calls or format")
    assert around is not None
    grammar = Grammar("json_schema", '{"anyOf": [{"type": "object"}, {"type": "array"}]}', around=around)
    assert lets_through(grammars, tokenizer, grammar, text)
