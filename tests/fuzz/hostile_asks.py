"""Grammars, schemas and tools that a hostile caller may send: of forms that are known to cost much, in any size."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

from tests.baton.random_schemas import random_schema

Draw = Callable[[random.Random], Any]
TEXT = (
    '{    "',
    '"\\"',
    "[[",
    "((",
    "{ 9 , ",
    "a{2}",
    "{2}{2}{2}",
    "\\",
    "(a+)+",
    "[^",
    "\ud7ff",
    "\n",
    ": %json {",
    "^$|",
)
LINKS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda inner: inner if isinstance(inner, dict) else [inner],
    "allOf": lambda inner: {"allOf": [inner, {"type": ["object", "array", "string"]}]},
    "anyOf": lambda inner: {"anyOf": [inner, {"type": "null"}]},
    "items": lambda inner: {"type": "array", "items": inner},
    "properties": lambda inner: {"type": "object", "properties": {"a": inner}, "required": ["a"]},
    "patternProperties": lambda inner: {"type": "object", "patternProperties": {"^a": inner}, "minProperties": 1},
    "not": lambda inner: {"not": inner},
}


def size(chance: random.Random, most: float) -> int:
    """Mostly small; small and large ones are drawn as often by their digits."""
    return int(10 ** chance.uniform(0, most))


def text(chance: random.Random) -> str:
    pieces = chance.choices(TEXT, k=chance.randint(1, 3))
    return "".join(piece * size(chance, 3) for piece in pieces)


def chained(chance: random.Random) -> Any:
    """Definitions, each of which refers to the next; at times in a circle."""
    links, count = chance.sample(list(LINKS.values()), chance.randint(1, 2)), size(chance, 3.4)
    last: Any = {"$ref": "#/$defs/d0"} if chance.random() < 0.2 else {"type": "string"}
    named = {f"d{i}": links[i % len(links)]({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": named | {f"d{count}": last}}


def nested(chance: random.Random) -> Any:
    """A sign for `written`, because json.dumps goes less deep than others who write JSON."""
    return f"@{chance.choice(list(LINKS))} {size(chance, 3.6)}"


def written(what: Any) -> str:
    """As JSON."""
    return re.sub(r'"@(\w+) (\d+)"', _deep, what if isinstance(what, str) else json.dumps(what))


def _deep(sign: "re.Match[str]") -> str:
    begin, end = json.dumps(LINKS[sign[1]]("@")).split('"@"')
    return begin * int(sign[2]) + '{"type": "string"}' + end * int(sign[2])


def heavy(chance: random.Random) -> Any:
    """Small to write and large to compile."""
    number = chance.randint(2, 99991)
    return {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "multipleOf": number},
            "f": {"type": "number", "multipleOf": number / 1000, "minimum": -number, "maximum": 10.0**300},
            "s": {
                "type": "string",
                "pattern": text(chance),
                "minLength": size(chance, 6),
                "maxLength": size(chance, 9),
            },
            "l": {"type": "array", "items": {"enum": list(range(size(chance, 3)))}, "maxItems": size(chance, 6)},
            "d": {"type": "string", "description": text(chance), "format": chance.choice(("date", "no-format"))},
        },
        "patternProperties": {chance.choice(("^n", ".*", text(chance))): {"const": text(chance)}},
        "required": chance.sample(("n", "f", "s", "l", "d"), 2),
        "additionalProperties": chance.choice((False, True, {"type": "string"})),
    }


def schema(chance: random.Random) -> Any:
    return chance.choice((random_schema, chained, nested, heavy))(chance)


def tag(chance: random.Random) -> Any:
    contents = ({"type": "regex", "pattern": text(chance)}, {"type": "json_schema", "json_schema": schema(chance)})
    form: Any = {"type": "tag", "begin": f"<{text(chance)[:9]}", "content": chance.choice(contents), "end": ">"}
    for _ in range(size(chance, 2.5)):
        form = {"type": chance.choice(("sequence", "or")), "elements": [form]}
    return {"type": "structural_tag", "format": form}


def ebnf(chance: random.Random) -> str:
    rules = [f"r{i}: r{i + 1}{chance.choice(('', '*', '{2,3}', ' | r0'))}" for i in range(size(chance, 3))]
    last = chance.choice(
        (f"/{text(chance)}/".replace("\n", ""), json.dumps(text(chance)), "%json " + written(schema(chance)))
    )
    return "\n".join(("start: r0", *rules, f"r{len(rules)}: {last}"))


GRAMMARS: dict[str, Draw] = {
    "regex": text,
    "ebnf": ebnf,
    "structural_tag": lambda chance: written(tag(chance)),
    "choice": text,
}
"""Kind of a grammar -> its text."""


def tools(chance: random.Random) -> list[Any]:
    def one(number: int) -> Any:
        parameters = {"type": "object", **(drawn if isinstance(drawn := schema(chance), dict) else {})}
        told = {"description": text(chance)} if chance.random() < 0.3 else {}
        function = {"name": f"f{number}", **told, "parameters": parameters, "strict": chance.random() < 0.5}
        return {"type": "function", "function": function}

    return [one(number) for number in range(chance.randint(1, 3))]


def chat(chance: random.Random) -> Any:
    """A body for OpenAI's chat API."""
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": text(chance)[:2000]}]}
    if chance.random() < 0.7:
        choices = ("auto", "required", "none", {"type": "function", "function": {"name": "f0"}})
        body |= {"tools": tools(chance), "tool_choice": chance.choice(choices)}
    if chance.random() < 0.5:
        wrapped = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema(chance)}}
        body |= chance.choice(
            ({"response_format": wrapped}, {"response_format": tag(chance)}, {"guided_regex": text(chance)})
        )
    return body | {"stop": [text(chance)[:1024]], "n": chance.randint(1, 3)}


def messages(chance: random.Random) -> Any:
    """A body for Anthropic's API."""
    given = [one["function"] for one in tools(chance)]
    told = [{"name": one["name"], "input_schema": one["parameters"]} for one in given]
    choice = chance.choice(({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f0"}))
    body = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}], "tools": told}
    form = (
        {"output_config": {"format": {"type": "json_schema", "schema": schema(chance)}}}
        if chance.random() < 0.3
        else {}
    )
    return {**body, **form, "tool_choice": choice}


def responses(chance: random.Random) -> Any:
    """A body for OpenAI's Responses API."""
    told = [{"type": "function", **one["function"]} for one in tools(chance)]
    called = {"type": "function_call", "call_id": text(chance), "name": "f0", "arguments": text(chance)}
    items = [{"role": "user", "content": "?"}, *([called] if chance.random() < 0.3 else [])]
    form = {"format": {"type": "json_schema", "name": "a", "schema": schema(chance)}}
    wanted = (
        {"text": form} if chance.random() < 0.3 else {"tools": told, "tool_choice": chance.choice(("auto", "required"))}
    )
    return {"model": "tiny", "input": items, **wanted}


BODIES: dict[str, Draw] = {
    "/v1/chat/completions": chat,
    "/v1/messages": messages,
    "/v1/responses": responses,
}
