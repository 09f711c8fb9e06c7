"""The form that an answer must have, in every spelling of HTTP: OpenAI's `response_format`, vLLM's
`structured_outputs`, and the `guided_...` fields that vLLM had before."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from baton_proto.grammar import Grammar, GrammarKind
from router.api.wishes.json_shape import check_depth
from runtime.errors import InvalidRequestError, shown

Read = Callable[[str, Any], Grammar | None]
"""(the caller's name of a value, the value) -> its grammar. Raises InvalidRequestError."""


def grammar_of(given: Mapping[str, Any]) -> tuple[Grammar, str] | None:
    """The grammar of a request and the name of the field that says it. Raises InvalidRequestError, also for several."""
    found = []
    for name, value in given.items():
        if value is None:
            continue
        if name == "structured_outputs":
            found += _structured(name, value)
        elif grammar := FIELDS[name](name, value):
            found.append((grammar, _schema_name(name, value)))
    if len(found) > 1:
        names = " and ".join(name for _, name in found)
        raise InvalidRequestError(found[1][1], f"{names} contradict each other: leave all but one out")
    return found[0] if found else None


def _schema_name(name: str, value: Any) -> str:
    is_schema = name == "response_format" and value["type"] == "json_schema"
    return f"{name}.json_schema.schema" if is_schema else name


def _structured(name: str, value: Any) -> list[tuple[Grammar, str]]:
    members = _object(name, value)
    for member in members:
        if member not in MEMBERS:
            raise InvalidRequestError(f"{name}.{member}"[:100], f"is not known here; known are {', '.join(MEMBERS)}")
    found = []
    for member, read in MEMBERS.items():
        if members.get(member) is not None and (grammar := read(f"{name}.{member}", members[member])):
            found.append((grammar, f"{name}.{member}"))
    return found


def _response_format(name: str, value: Any) -> Grammar | None:
    match _object(name, value).get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar("json_object")
        case "json_schema":
            # `strict` false asks for a best effort, and `name` is for the model's eyes: the schema holds either way.
            wrapped = _object(f"{name}.json_schema", value.get("json_schema"))
            return schema_grammar(f"{name}.json_schema.schema", wrapped.get("schema"))
        case "structural_tag":
            return json_grammar("structural_tag", name, value)
    known = "text, json_object, json_schema, structural_tag"
    raise InvalidRequestError(f"{name}.type", f"is {shown(value.get('type'))}, must be one of {known}")


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(name, "is missing or not an object")
    return value


def json_grammar(kind: GrammarKind, name: str, value: Any) -> Grammar:
    """`value`: what the grammar is written as, or the text of it. Raises InvalidRequestError."""
    if not isinstance(value, Mapping | str | bool):
        raise InvalidRequestError(name, "must be an object, or its text")
    if isinstance(value, str):
        check_depth(name, value)
    return Grammar(kind, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def schema_grammar(name: str, value: Any) -> Grammar:
    """Raises InvalidRequestError."""
    return json_grammar("json_schema", name, value)


def _text(kind: GrammarKind) -> Read:
    def read(name: str, value: Any) -> Grammar:
        if not isinstance(value, str):
            raise InvalidRequestError(name, "must be a text")
        return Grammar(kind, value)

    return read


def _choice(name: str, value: Any) -> Grammar:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise InvalidRequestError(name, "must be a list of texts")
    return Grammar("choice", choices=tuple(value))


def _flag(name: str, value: Any) -> Grammar | None:
    if not isinstance(value, bool):
        raise InvalidRequestError(name, "must be true or false")
    return Grammar("json_object") if value else None


_regex, _ebnf = _text("regex"), _text("ebnf")
MEMBERS: Mapping[str, Read] = {
    "json": schema_grammar,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
    "json_object": _flag,
    "structural_tag": partial(json_grammar, "structural_tag"),
}
"""Members of `structured_outputs`."""
FIELDS: Mapping[str, Read] = {
    "response_format": _response_format,
    "guided_json": schema_grammar,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _ebnf,
}
"""Fields of a request beside `structured_outputs`."""
STRUCTURED = (*FIELDS, "structured_outputs")
