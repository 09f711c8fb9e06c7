"""Every spelling of a grammar reaches the engine as the same one; what contradicts or is malformed is refused."""

import json
from typing import Any

import pytest

from baton_proto.generated import inference_pb2 as pb
from baton_proto.grammar import Grammar
from router.api.dialects.json_body import decode_body
from router.api.grpc.messages import options_of
from router.api.openai.types import ChatBody, CompletionBody
from runtime.errors import InvalidRequestError
from tests.router.http_client import CHAT, COMPLETION

SCHEMA = {"type": "object"}
WRAPPED = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
TAG = {"type": "structural_tag", "structures": [], "triggers": []}
OF_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA))
SPELLINGS: list[tuple[dict[str, Any], Grammar | None, str]] = [
    ({"response_format": {"type": "text"}}, None, ""),
    ({"response_format": {"type": "json_object"}}, Grammar("json_object"), "response_format"),
    ({"response_format": WRAPPED}, OF_SCHEMA, "response_format.json_schema.schema"),
    ({"response_format": TAG}, Grammar("structural_tag", json.dumps(TAG)), "response_format"),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, OF_SCHEMA, "structured_outputs.json"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, OF_SCHEMA, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_object"), "structured_outputs.json_object"),
    (
        {"structured_outputs": {"choice": ["a", "b"]}},
        Grammar("choice", choices=("a", "b")),
        "structured_outputs.choice",
    ),
    ({"guided_json": SCHEMA}, OF_SCHEMA, "guided_json"),
    ({"guided_regex": "a+"}, Grammar("regex", "a+"), "guided_regex"),
    ({"guided_choice": ["a"]}, Grammar("choice", choices=("a",)), "guided_choice"),
    ({"guided_grammar": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"'), "guided_grammar"),
]


@pytest.mark.parametrize(("body", "kind"), [(CHAT, ChatBody), (COMPLETION, CompletionBody)])
@pytest.mark.parametrize(("spelled", "grammar", "field"), SPELLINGS, ids=[str(each[0])[:40] for each in SPELLINGS])
def test_http_has_several_names(body: Any, kind: Any, spelled: Any, grammar: Grammar | None, field: str) -> None:
    options = decode_body(json.dumps(body | spelled).encode(), kind).options()
    assert options.given.get("grammar") == grammar
    assert grammar is None or options.name_of("grammar") == field


@pytest.mark.parametrize(
    ("spelled", "problem"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "contradict each other"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "contradict each other"),
        ({"response_format": WRAPPED, "guided_regex": "a"}, "contradict each other"),
        ({"response_format": {"type": "xml"}}, "response_format.type: is 'xml', must be one of text"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: is missing"),
        ({"response_format": "json"}, "not an object"),
        ({"structured_outputs": {"schema": {}}}, "structured_outputs.schema: is not known here"),
        ({"guided_choice": "a"}, "guided_choice: must be a list of texts"),
        ({"guided_regex": 3}, "guided_regex: must be a text"),
        ({"guided_json": [1]}, "guided_json: must be an object"),
    ],
)
def test_what_is_malformed_is_refused_by_its_name(spelled: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        decode_body(json.dumps(CHAT | spelled).encode(), ChatBody).options()


@pytest.mark.parametrize(
    ("message", "grammar"),
    [
        (pb.Grammar(json_object=pb.JsonObject()), Grammar("json_object")),
        (pb.Grammar(json_schema="{}"), Grammar("json_schema", "{}")),
        (pb.Grammar(regex="a"), Grammar("regex", "a")),
        (pb.Grammar(choice=pb.Alternatives(texts=["a", "b"])), Grammar("choice", choices=("a", "b"))),
        (pb.Grammar(ebnf="x"), Grammar("ebnf", "x")),
        (pb.Grammar(structural_tag="{}"), Grammar("structural_tag", "{}")),
    ],
)
def test_grpc_has_a_kind_for_each(message: pb.Grammar, grammar: Grammar) -> None:
    assert options_of(pb.SamplingOptions(grammar=message)).given == {"grammar": grammar}


def test_an_empty_grammar_is_refused_over_grpc() -> None:
    with pytest.raises(InvalidRequestError, match="one of its kinds"):
        options_of(pb.SamplingOptions(grammar=pb.Grammar()))
