import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from baton_proto.grammar import Grammar
from runtime.errors import InvalidRequestError
from runtime.grammar.compiler import GrammarCompiler
from tests.tiny_model import EOS_TOKEN_IDS

LARGE = 2**53 + 1


def follows(compiler: GrammarCompiler, folder: Path, schema: Any, text: str) -> bool:
    matcher = compiler.matcher(Grammar("json_schema", json.dumps(schema)))
    encoded = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    matcher.mask([*encoded, EOS_TOKEN_IDS[0]])
    return not matcher.problem


def test_an_unknown_format_is_an_annotation_and_a_known_one_is_kept_to(
    compiler: GrammarCompiler, tiny_model: Path
) -> None:
    properties = {"format": {"type": "string", "format": "iban"}, "day": {"anyOf": [{"format": "date"}]}}
    schema = {"type": "object", "properties": {**properties, "kind": {"const": {"format": "any"}}}}
    assert follows(compiler, tiny_model, schema, '{"format":"no IBAN","day":"2026-02-28","kind":{"format":"any"}}')
    assert not follows(compiler, tiny_model, schema, '{"format":"no IBAN","day":"tomorrow"}')
    assert not follows(compiler, tiny_model, schema, '{"format":"","day":"2026-02-28","kind":{}}')


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"minimum": LARGE}, LARGE + 1, LARGE - 1),
        ({"maximum": LARGE}, LARGE - 1, LARGE + 1),
        ({"maximum": 2**63 - 1, "minimum": -(2**63)}, -(2**63) + 1024, 2**63),
        ({"exclusiveMaximum": 2**64, "minimum": 0}, 2**63 - 1024, 2**64),
    ],
)
def test_bounds_beyond_2_to_the_53_are_never_passed(
    compiler: GrammarCompiler, tiny_model: Path, schema: dict[str, int], valid: int, invalid: int
) -> None:
    whole = {"type": "integer", **schema}
    assert follows(compiler, tiny_model, whole, str(valid))
    assert not follows(compiler, tiny_model, whole, str(invalid))


@pytest.mark.parametrize("schema", [{"const": LARGE}, {"enum": [1, -LARGE]}, {"const": {"a": [LARGE]}}])
def test_integers_that_cannot_be_followed_exactly_are_refused_with_their_path(
    compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequestError, match=r"\$\.properties\.n\.(const|enum) has -?9007199254740993"):
        compiler.matcher(Grammar("json_schema", json.dumps({"properties": {"n": schema}})))
