"""Answers with a grammar match it, from a model whose answers are noise."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from baton import LLM, SamplingParams
from baton_proto.grammar import Grammar
from tests.baton.random_schemas import random_schema
from tests.service import ON_DEVICE


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, **ON_DEVICE | {"kv_memory": "16MiB"}) as llm:
        yield llm


def mismatch(schema: dict[str, Any], text: str) -> str | None:
    """Why an answer is wrong; None: it is right."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{json.dumps(schema)} gives {text!r}: {error!s:.200}"
    return None


def schema_answers(llm: LLM, count: int, seed: int) -> tuple[int, list[str]]:
    """(complete answers, what is wrong with them) over random schemas."""
    source = random.Random(seed)
    schemas = [random_schema(source) for _ in range(count)]
    params = [
        SamplingParams(
            temperature=source.choice([0.0, 1.0]),
            max_tokens=200,
            seed=number,
            min_tokens=source.choice([0, 5]),
            top_p=source.choice([1.0, 0.9]),
            ignore_eos=source.random() < 0.1,
            grammar=Grammar("json_schema", json.dumps(schema)),
        )
        for number, schema in enumerate(schemas)
    ]
    answers = llm.generate(["Say something."] * count, params, progress=False)
    pairs = [(schema, one.text) for schema, one in zip(schemas, answers, strict=True) if one.finish_reason == "stop"]
    return len(pairs), [wrong for schema, text in pairs if (wrong := mismatch(schema, text))]


def test_every_complete_answer_validates_against_its_schema(llm: LLM) -> None:
    complete, wrong = schema_answers(llm, 100, seed=1)
    assert wrong == []
    assert complete > 80


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", "[a-f]{3,8}-[0-9]{2}"), "[a-f]{3,8}-[0-9]{2}"),
        (Grammar("choice", choices=("yes", "no", "perhaps")), "yes|no|perhaps"),
        (Grammar("ebnf", 'root ::= "(" root ")" | "x"'), r"\(*x\)*"),
    ],
    ids=["regex", "choice", "ebnf"],
)
def test_answers_match_other_grammars(llm: LLM, grammar: Grammar, pattern: str) -> None:
    answers = llm.generate(["Say it."] * 8, SamplingParams(max_tokens=60, seed=3, grammar=grammar), progress=False)
    for answer in answers:
        assert answer.finish_reason != "stop" or re.fullmatch(pattern, answer.text), answer.text
    assert any(answer.finish_reason == "stop" for answer in answers)


def test_neighbours_without_a_grammar_answer_as_they_do_alone(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=30, seed=5)
    (alone,) = llm.generate("A relay race", plain, progress=False)
    constrained = SamplingParams(max_tokens=30, seed=5, logprobs=2, grammar=Grammar("json_object"))
    beside, answer = llm.generate(["A relay race"] * 2, [plain, constrained], progress=False)
    assert beside.token_ids == alone.token_ids
    assert answer.text.lstrip().startswith("{")
    assert len(answer.logprobs) == len(answer.token_ids)
