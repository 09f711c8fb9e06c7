"""Translates what a request says to what llguidance reads: JSON with one or several grammars."""

import json
import re
from typing import Any

import llguidance

from baton_proto.grammar import Grammar
from runtime.grammar.schemas import check_depth, enforced
from runtime.grammar.structural_tags import tags_source
from runtime.grammar.words.lark_rules import JSON_OPTIONS
from runtime.grammar.words.marks import Marks

_STRING = re.compile(r'"((?:[^"\\]++|\\.)*+)"?', re.DOTALL)  # one without an end is the rest


def llguidance_source(grammar: Grammar, marks: Marks) -> str:
    """`marks`: of the model. Raises ValueError.

    Because a model spells marks as their tokens and llguidance reads them as other text, nothing is forced: where a
    grammar leaves no choice of text, any tokens may spell it. That is also faster than to tokenize it.
    """
    whole = '%llguidance {"no_forcing": true}\n' + (grammar.around or "start: @format")
    return json.dumps({"grammars": [{"lark_grammar": whole}, {**_format(grammar, marks), "name": "format"}]})


def _format(grammar: Grammar, marks: Marks) -> dict[str, Any]:
    match grammar.kind:
        case "json_object":
            return _only(json_source({"type": "object"}))
        case "json_schema":
            return _only(json_source(parsed(grammar.text)))
        case "regex":
            return _only(llguidance.LLMatcher.grammar_from_regex(grammar.text))
        case "choice":
            if not grammar.choices or not all(grammar.choices):
                raise ValueError("needs one or more texts, none of them empty")
            texts = (json.dumps(text, ensure_ascii=False) for text in grammar.choices)
            return {"lark_grammar": "start: TEXT\nTEXT: " + " | ".join(texts)}
        case "ebnf":
            return {"lark_grammar": marks.numbered(llguidance.grammar_from("grammar", grammar.text))}
        case "structural_tag":
            return {"lark_grammar": tags_source(parsed(grammar.text), marks)}


def _only(source: str) -> dict[str, Any]:
    (grammar,) = json.loads(source)["grammars"]
    return dict(grammar)


def longest_text(grammar: Grammar) -> int:
    """Characters of the longest text that an answer is matched against in one piece, as they are written."""
    if grammar.kind == "regex":
        own = len(grammar.text)
    elif grammar.kind == "ebnf":
        own = _longest_of_lark(grammar.text)
    else:
        own = max((*map(len, grammar.choices), _longest_string(grammar.text)))
    return max(own, _longest_of_lark(grammar.around))


def _longest_of_lark(text: str) -> int:
    """The schemas of tools stand on lines of their own."""
    rules = [line.partition(": %json {") for line in text.split("\n")]
    schemas = [schema for _, _, schema in rules if schema.endswith("}")]
    return max((len(text) - sum(map(len, schemas)), *map(_longest_string, schemas)))


def _longest_string(text: str) -> int:
    return max((len(string[1]) for string in _STRING.finditer(text)), default=0)


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def json_source(schema: Any) -> str:
    if not isinstance(schema, dict | bool):
        raise ValueError(f"must be an object or a boolean, not {type(schema).__name__}")
    check_depth(schema)
    try:
        told = enforced(schema) if isinstance(schema, dict) else {} if schema else {"not": {}}
        text = json.dumps(told)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
