"""Grammars of requests: which are drawn, how a client says one, and whether an answer matches it."""

import json
import random
import re
from typing import Any

from baton_proto.generated import inference_pb2 as pb
from baton_proto.grammar import Grammar
from tests.baton import schema_judge
from tests.baton.random_schemas import random_schema

SHARE = 0.3  # of the requests
WEIGHTS = {"json_schema": 3, "regex": 2, "choice": 1}
REGEXES = (
    r"[a-e]{30,200}",
    r"([0-9]{1,4},){5,60}",
    r"(yes|no|perhaps)(, (yes|no|perhaps)){3,40}\.",
    r"[^x]{1,9}-[ü-ż]{8,20}",
)
LETTERS = "abcdefghijklmnop "


def draw(chance: random.Random) -> Grammar:
    """A schema, a regular expression, or a choice of texts with common beginnings."""
    match chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]:
        case "json_schema":
            return Grammar("json_schema", json.dumps(random_schema(chance)))
        case "regex":
            return Grammar("regex", chance.choice(REGEXES))
    begin = "".join(chance.choices(LETTERS, k=chance.randint(1, 40)))
    ends = ("".join(chance.choices(LETTERS, k=chance.randint(1, 80))) for _ in range(chance.randint(2, 20)))
    return Grammar("choice", choices=tuple(sorted({begin + end for end in ends})))


def over_grpc(grammar: Grammar) -> pb.Grammar:
    if grammar.kind == "choice":
        return pb.Grammar(choice=pb.Alternatives(texts=grammar.choices))
    return pb.Grammar(**{grammar.kind: grammar.text})


def over_http(grammar: Grammar) -> dict[str, Any]:
    """Fields of the body."""
    match grammar.kind:
        case "json_schema":
            return {"response_format": {"type": "json_schema", "json_schema": {"schema": json.loads(grammar.text)}}}
        case "choice":
            return {"structured_outputs": {"choice": list(grammar.choices)}}
        case kind:
            return {"structured_outputs": {kind: grammar.text}}


def mismatch(grammar: Grammar, text: str) -> str:
    """Why a whole answer is not valid; empty when it is."""
    match grammar.kind:
        case "json_schema":
            return schema_judge.mismatch(json.loads(grammar.text), text)
        case "choice":
            return "" if text in grammar.choices else f"{text!r} is none of {grammar.choices}"
    return "" if re.fullmatch(grammar.text, text) else f"{text!r} does not match {grammar.text!r}"
