"""From what a request says to what llguidance reads: JSON with one or several grammars."""

import json
import re
from typing import Any

import llguidance

from baton_proto.grammar import Grammar
from runtime.grammar.bounds import check_depth
from runtime.grammar.schemas import enforced
from runtime.grammar.structural_tags import tags_source

WHITESPACE = r"[\x20\x0A\x0D\x09]{0,16}"  # bounded: a model that writes nothing else would never end
JSON_OPTIONS: Any = {"whitespace_pattern": WHITESPACE}
_STRING = re.compile(r'"((?:[^"\\]++|\\.)*+)"?', re.DOTALL)  # one without an end is the rest


def llguidance_source(grammar: Grammar) -> str:
    """Raises ValueError."""
    match grammar.kind:
        case "json_object":
            return json_source({"type": "object"})
        case "json_schema":
            return json_source(parsed(grammar.text))
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            if not grammar.choices or not all(grammar.choices):
                raise ValueError("needs one or more texts, none of them empty")
            texts = (json.dumps(text, ensure_ascii=False) for text in grammar.choices)
            return llguidance.LLMatcher.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(texts))
        case "ebnf":
            return llguidance.grammar_from("grammar", grammar.text)
        case "structural_tag":
            return tags_source(parsed(grammar.text), JSON_OPTIONS)


def longest_text(grammar: Grammar) -> int:
    """Characters of the longest text that an answer is matched against in one piece, as they are written."""
    if grammar.kind == "regex":
        return len(grammar.text)
    if grammar.kind == "ebnf":  # the schemas of tools stand on lines of their own
        rules = [line.partition(": %json {") for line in grammar.text.split("\n")]
        schemas = [schema for _, _, schema in rules if schema.endswith("}")]
        return max((len(grammar.text) - sum(map(len, schemas)), *map(_longest_string, schemas)))
    return max((*map(len, grammar.choices), _longest_string(grammar.text)))


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
